from typing import Literal

import pytest
from pydantic import Field

from rollfarm.config import Config, ConfigError, Listen, Root, load, load_or_exit, masked, read


class Item(Config):
    name: str


class BufferTable(Config):
    listen: Listen = Listen(port=7003)
    capacity: int = Field(default=3, ge=0)
    """Groups held."""
    items: list[Item] = []
    password: str = ""
    order: Literal["newest", "oldest"] = "oldest"


class BufferRoot(Root):
    sample_buffer: BufferTable = BufferTable()

    def check(self) -> None:
        if len(self.sample_buffer.items) > self.sample_buffer.capacity:
            raise ConfigError("sample_buffer.items: too many. Raise capacity.")


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def loaded(*argv: str) -> BufferTable:
    return load(BufferRoot, argv, prog="test").sample_buffer


def test_files_compose_left_to_right_and_flags_win(write):
    base = write("base.toml", "[sample_buffer]\ncapacity = 5\nlisten.host = '::'\n[[sample_buffer.items]]\nname = 'a'")
    site = write("site.toml", "[sample_buffer]\ncapacity = 6")

    table = loaded(base, site, "--sample_buffer.listen.port", "99")

    assert table.capacity == 6
    assert table.listen == Listen(host="::", port=99)
    assert table.items == [Item(name="a")]


def test_the_environment_stands_between_files_and_flags(write, monkeypatch):
    file = write("farm.toml", "[sample_buffer]\ncapacity = 5\npassword = 'in a file'")
    monkeypatch.setenv("ROLLFARM_SAMPLE_BUFFER__PASSWORD", "secret")
    monkeypatch.setenv("ROLLFARM_SAMPLE_BUFFER__CAPACITY", "7")

    table = loaded(file, "--sample_buffer.capacity", "8")

    assert (table.password, table.capacity) == ("secret", 8)


def test_tables_of_other_services_are_ignored(write):
    file = write("farm.toml", "[trainer]\nlr = 1\n[sample_buffer]\ncapacity = 5")

    assert loaded(file).capacity == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sample_buffer]\ncapacty = 1", "sample_buffer.capacty: unknown key. Did you mean 'capacity'?"),
        ("[sample_buffer.listen]\nprot = 1", "sample_buffer.listen.prot: unknown key. Did you mean 'port'?"),
        ("[[sample_buffer.items]]\nname = 'a'\nnam = 'b'", "items.0.nam: unknown key. Did you mean 'name'?"),
        ("[sample_bufer]\ncapacity = 1", r"unknown table \[sample_bufer\]. Did you mean 'sample_buffer'?"),
        ("[sample_buffer]\norder = 'newst'", "sample_buffer.order: unknown value 'newst'. Did you mean 'newest'?"),
        ("[sample_buffer]\ncapacity = -1", "sample_buffer.capacity: Input should be greater than or equal to 0"),
        ("[sample_buffer", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_a_remedy(write, text, message):
    with pytest.raises(ConfigError, match=message):
        loaded(write("farm.toml", text))


def test_an_unknown_flag_names_the_nearest_one():
    with pytest.raises(
        ConfigError,
        match=r"lisen\.port: unknown flag\. Did you mean --sample_buffer\.listen\.port\? --help lists them all\.",
    ):
        loaded("--sample_buffer.lisen.port", "3")


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"absent.toml: no such file"):
        loaded("absent.toml")


def test_a_wrong_configuration_ends_a_service_with_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        load_or_exit(BufferRoot, ["--sample_buffer.capacity", "many"], prog="python -m sample_buffer")

    assert ended.value.code == 2
    assert "sample_buffer.capacity: Input should be a valid integer" in capsys.readouterr().err


def test_what_keys_do_not_show_by_themselves_is_checked_last(write):
    file = write("farm.toml", "[sample_buffer]\ncapacity = 0\n[[sample_buffer.items]]\nname = 'a'")

    with pytest.raises(ConfigError, match="too many"):
        loaded(file)

    assert read(BufferRoot, [file], prog="test").sample_buffer.capacity == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:hush@db:6379/0", "redis://***@db:6379/0"),
        ("rediss://me:hu@sh@db", "rediss://***@db"),
        ("unix:///tmp/s?db=0&password=hush", "unix:///tmp/s?db=0&password=***"),
        ("redis+sentinel://me:hush@a:1,b:2/m", "redis+sentinel://***@a:1,b:2/m"),
        ("redis+sentinel://a,b/m?sentinel_password=hush&db=1", "redis+sentinel://a,b/m?sentinel_password=***&db=1"),
        ("one http://a:b@c/d and http://e/f@g", "one http://***@c/d and http://e/f@g"),
        ("redis://db:6379, mail me@db", "redis://db:6379, mail me@db"),
    ],
)
def test_passwords_of_urls_are_masked(text, shown):
    assert masked(text) == shown
    assert str(ConfigError(text)) == shown


def test_a_masked_password_is_asked_of_the_environment(write, monkeypatch):
    file = write("farm.toml", "[sample_buffer]\npassword = 'redis://***@db'")
    with pytest.raises(ConfigError, match=r"sample_buffer\.password: .* as ROLLFARM_SAMPLE_BUFFER__PASSWORD"):
        loaded(file)

    monkeypatch.setenv("ROLLFARM_SAMPLE_BUFFER__PASSWORD", "redis://:hush@db")

    assert loaded(file).password == "redis://:hush@db"
