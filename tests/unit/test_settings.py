"""Settings: one table feeds parsing, errors and docs/settings.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hvkeras.errors import UsageError
from hvkeras.settings import IGNORED, TABLE, Setting, Settings, ignored_variables

PAGE = Path(__file__).resolve().parents[2] / "docs" / "settings.md"
PUBLIC = [row for row in TABLE if not row.internal]


def test_names_and_aliases_are_unique() -> None:
    names = [row.name for row in TABLE] + [row.horovod for row in TABLE if row.horovod]
    assert len(names) == len(set(names))


def test_defaults_without_an_environment() -> None:
    settings = Settings({})
    assert {row.name: getattr(settings, row.name) for row in TABLE} == {row.name: row.default for row in TABLE}


@pytest.mark.parametrize("row", PUBLIC, ids=lambda row: row.name)
def test_every_setting_has_a_sentence_of_help(row: Setting) -> None:
    assert row.help[0].isupper()
    assert row.help.endswith(".")


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HVKERAS_BACKEND", "tfdist", "backend", "tfdist"),
        ("HVKERAS_START_TIMEOUT", "2.5", "start_timeout", 2.5),
        ("HVKERAS_START_TIMEOUT", " 90s ", "start_timeout", 90.0),
        ("HOROVOD_START_TIMEOUT", "30", "start_timeout", 30.0),
        ("HVKERAS_BUCKET_SIZE", "64MB", "bucket_size", 64_000_000),
        ("HVKERAS_BUCKET_SIZE", "1.5 MiB", "bucket_size", 1_572_864),
        ("HOROVOD_FUSION_THRESHOLD", "67108864", "bucket_size", 67_108_864),
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "bucket_size", 64_000_000),
        ("HVKERAS_THREADS", "off", "threads", False),
        ("HVKERAS_COMPILE_UPDATE", "off", "compile_update", False),
        ("HVKERAS_COMPILE_UPDATE", "Auto", "compile_update", "auto"),
        ("HVKERAS_THREADS", "1", "threads", True),
        ("HVKERAS_LOG_LEVEL", "debug", "log_level", "DEBUG"),
        ("HVKERAS_NETWORK_INTERFACES", "eth0, lo,", "network_interfaces", ("eth0", "lo")),
        ("HVKERAS_NETWORK_COSTS", "3ms, 10Gbit", "network_costs", (0.003, 1.25e9)),
        ("HVKERAS_START_TIMEOUT", "  ", "start_timeout", 60.0),
    ],
)
def test_values_are_read(variable: str, text: str, name: str, value: object) -> None:
    assert getattr(Settings({variable: text}), name) == value


def test_our_variable_wins_over_horovods() -> None:
    environ = {"HVKERAS_START_TIMEOUT": "10", "HOROVOD_START_TIMEOUT": "20"}
    assert Settings(environ).start_timeout == 10


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HVKERAS_BUCKET_SIZE", "64 lots"),
        ("HVKERAS_BUCKET_SIZE", "-1"),
        ("HVKERAS_START_TIMEOUT", "soon"),
        ("HVKERAS_START_TIMEOUT", "-1"),
        ("HVKERAS_START_TIMEOUT", "nan"),
        ("HVKERAS_START_TIMEOUT", "0"),
        ("HVKERAS_LIVENESS_TIMEOUT", "0"),
        ("HVKERAS_LIVENESS_TIMEOUT", "0.9"),
        ("HVKERAS_THREADS", "perhaps"),
        ("HVKERAS_COMPILE_UPDATE", "perhaps"),
        ("HVKERAS_LOG_LEVEL", "LOUD"),
        ("HOROVOD_FUSION_THRESHOLD", "many"),
        ("HVKERAS_NETWORK_COSTS", "25us"),
        ("HVKERAS_NETWORK_COSTS", "25,10Gbit"),
    ],
)
def test_unreadable_values_are_errors_that_name_variable_and_value(variable: str, text: str) -> None:
    with pytest.raises(UsageError, match=rf"{variable} must be readable.*Received: value='{text}'.*HINT: "):
        Settings({variable: text})


@pytest.mark.parametrize("text", ["mine", "fifteen bytes..", "  padded with 15.  ", "é" * 7, "\udcff"])
def test_a_secret_that_can_be_guessed_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        Settings({"HVKERAS_SECRET": text})
    message, size = str(caught.value), len(text.strip().encode(errors="surrogateescape"))
    assert message.startswith(f"HVKERAS_SECRET must have at least 16 bytes, so that nobody can guess it. Received:"
                              f" bytes={size}. HINT: ")
    assert text.strip() not in message
    command = re.search(r"HINT: run python (-c) \"(.*)\" once, and set", message)
    assert command is not None
    made = subprocess.run([sys.executable, *command.groups()], capture_output=True, text=True, check=True).stdout
    assert Settings({"HVKERAS_SECRET": made.strip()}).secret == made.strip()


def test_a_secret_is_used_as_it_is() -> None:
    assert Settings({"HVKERAS_SECRET": " 16 bytes or more "}).secret == " 16 bytes or more "


def test_unknown_variables_are_errors_that_suggest_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"variable='HVKERAS_BAKEND'.*did you mean HVKERAS_BACKEND"):
        Settings({"HVKERAS_BAKEND": "tfdist"})
    with pytest.raises(UsageError, match=r"the valid names are .*HVKERAS_BACKEND, .*HVKERAS_THREADS"):
        Settings({"HVKERAS_XYZZY_PLUGH": "1"})


def test_settings_are_read_only() -> None:
    settings = Settings({})
    with pytest.raises(AttributeError, match="read-only"):
        settings.backend = "tfdist"
    with pytest.raises(AttributeError, match="no setting is called 'colour'"):
        _ = settings.colour


def _shown(row: Setting) -> str:
    if row.default is True or row.default is False:
        return "on" if row.default else "off"
    if isinstance(row.default, float):
        return f"{row.default:g}"
    return str(row.default) if row.default else ""


def test_horovods_switch_for_stalls_counts_where_ours_are_not_set() -> None:
    settings = Settings({"HOROVOD_STALL_CHECK_DISABLE": "1", "HVKERAS_STALL_SHUTDOWN": "30"})
    assert (settings.stall_warning, settings.stall_shutdown) == (0, 30)
    assert Settings({"HOROVOD_STALL_CHECK_DISABLE": "0"}).stall_warning == 60


def test_variables_that_mean_nothing_are_found() -> None:
    environ = {"HOROVOD_THREAD_AFFINITY": "5", "HOROVOD_AUTOTUNE": "1", "HOROVOD_TORUS_ALLREDUCE": "",
               "HOROVOD_RANK": "0", "HOROVOD_FUSION_THRESHOLD": "1"}
    assert ignored_variables(environ) == {
        "HOROVOD_AUTOTUNE": "there is nothing to tune", "HOROVOD_THREAD_AFFINITY": "no thread is bound to a core"}
    assert not IGNORED.keys() & {row.horovod for row in TABLE}


def _table() -> str:
    lines = ["| variable | meaning | default | Horovod's variable |", "| --- | --- | --- | --- |"]
    for row in PUBLIC:
        alias = f"`{row.horovod}`" if row.horovod else ""
        lines.append(f"| `{row.variable}` | {row.help} | {_shown(row)} | {alias} |")
    return f"<!-- settings -->\n\n{chr(10).join(lines)}\n\n<!-- end -->"


def test_the_page_has_the_table() -> None:
    assert _table() in PAGE.read_text(), "docs/settings.md is out of date: run python tests/unit/test_settings.py"


if __name__ == "__main__":  # writes the table into the page
    before, _, rest = PAGE.read_text().partition("<!-- settings -->")
    PAGE.write_text(before + _table() + rest.partition("<!-- end -->")[2])
