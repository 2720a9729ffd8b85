import pytest
from pydantic import Field

from rollfarm.config import Config, ConfigError, Listen, Root, load, load_or_exit


class Item(Config):
    name: str


class BufferTable(Config):
    listen: Listen = Listen(port=7003)
    capacity: int = Field(default=3, ge=0)
    """Groups held."""
    items: list[Item] = []
    password: str = ""


class BufferRoot(Root):
    sample_buffer: BufferTable = BufferTable()


@pytest.fixture
def write(tmp_path):
    def write(name: str, text: str) -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def read(*argv: str) -> BufferTable:
    return load(BufferRoot, argv, prog="test").sample_buffer


def test_files_compose_left_to_right_and_flags_win(write):
    base = write("base.toml", "[sample_buffer]\ncapacity = 5\nlisten.host = '::'\n[[sample_buffer.items]]\nname = 'a'")
    site = write("site.toml", "[sample_buffer]\ncapacity = 6")

    table = read(base, site, "--sample_buffer.listen.port", "99")

    assert table.capacity == 6
    assert table.listen == Listen(host="::", port=99)
    assert table.items == [Item(name="a")]


def test_the_environment_stands_between_files_and_flags(write, monkeypatch):
    file = write("farm.toml", "[sample_buffer]\ncapacity = 5\npassword = 'in a file'")
    monkeypatch.setenv("ROLLFARM_SAMPLE_BUFFER__PASSWORD", "secret")
    monkeypatch.setenv("ROLLFARM_SAMPLE_BUFFER__CAPACITY", "7")

    table = read(file, "--sample_buffer.capacity", "8")

    assert (table.password, table.capacity) == ("secret", 8)


def test_tables_of_other_services_are_ignored(write):
    file = write("farm.toml", "[trainer]\nlr = 1\n[sample_buffer]\ncapacity = 5")

    assert read(file).capacity == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sample_buffer]\ncapacty = 1", "sample_buffer.capacty: unknown key. Did you mean 'capacity'?"),
        ("[sample_buffer.listen]\nprot = 1", "sample_buffer.listen.prot: unknown key. Did you mean 'port'?"),
        ("[[sample_buffer.items]]\nname = 'a'\nnam = 'b'", "items.0.nam: unknown key. Did you mean 'name'?"),
        ("[sample_bufer]\ncapacity = 1", r"unknown table \[sample_bufer\]. Did you mean 'sample_buffer'?"),
        ("[sample_buffer]\ncapacity = -1", "sample_buffer.capacity: Input should be greater than or equal to 0"),
        ("[sample_buffer", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_a_remedy(write, text, message):
    with pytest.raises(ConfigError, match=message):
        read(write("farm.toml", text))


def test_an_unknown_flag_names_the_nearest_one():
    with pytest.raises(ConfigError, match=r"lisen.port: unknown flag. Did you mean --sample_buffer.listen.port"):
        read("--sample_buffer.lisen.port", "3")


def test_a_missing_file_is_named():
    with pytest.raises(ConfigError, match=r"absent.toml: no such file"):
        read("absent.toml")


def test_a_wrong_configuration_ends_a_service_with_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        load_or_exit(BufferRoot, ["--sample_buffer.capacity", "many"], prog="python -m sample_buffer")

    assert ended.value.code == 2
    assert "sample_buffer.capacity: Input should be a valid integer" in capsys.readouterr().err
