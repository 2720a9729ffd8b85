import gc
from collections.abc import Iterator

import pytest

from rollfarm.imports import importing


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    looks = gc.isenabled()
    yield
    if looks:
        gc.enable()
    else:
        gc.disable()


def test_nothing_is_looked_at_while_libraries_are_imported():
    gc.enable()

    with importing():
        assert not gc.isenabled()

    assert gc.isenabled()


def test_an_import_that_fails_leaves_the_collector_as_it_was():
    gc.enable()

    with pytest.raises(ImportError), importing():
        raise ImportError

    assert gc.isenabled()


def test_imports_inside_of_imports_leave_the_collector_off():
    with importing():
        with importing():
            pass

        assert not gc.isenabled()
