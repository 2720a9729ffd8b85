"""What tests of several rooms share."""

from pathlib import Path

import pytest

FARM = """
[run]
name = "small"
folder = "{folder}/runs"
[[run.domains]]
name = "lake"
environment = "frozen_lake"
[model]
path = "{folder}/model"
[model.create]
words = "at left down right up ice hole goal wall 0 1 2 3"
[reward_gateway.domains.lake]
rewards = [{{ name = "environment" }}]
"""


@pytest.fixture
def farm_file(tmp_path: Path) -> Path:
    """The file of a whole small farm, whose folders lie in `tmp_path`."""
    path = tmp_path / "farm.toml"
    path.write_text(FARM.format(folder=tmp_path))
    return path
