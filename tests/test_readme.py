"""The README's own commands, run as they stand: those that need no network, no model and no installing."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, flags=re.S) for line in block.splitlines()]


def test_everything_that_needs_no_model(tmp_path):
    pytest.importorskip("torch")
    commands = [c.split("  #")[0].strip() for c in COMMANDS if "--target t" in c or "reference.report" in c]
    setup, commands[0] = commands[0].split(" && ")
    assert setup == "pip install -e ."
    assert len(commands) == 11  # the main job, gaps; on the toy: floors, gaps, reports; training and serving
    for name in ("examples", "models", "reference", "fast"):
        (tmp_path / name).symlink_to(ROOT / name)
    small = {"--anchors": 1, "--steps": 3, "--limit": 16, "--requests": 1, "--answer-tokens": 16}
    for flag, number in small.items():
        commands = [re.sub(rf"{flag} \d+", f"{flag} {number}", command) for command in commands]
    documents = [run(command, tmp_path) for command in commands]
    tiny, gaps, toy, _, report, *_ = documents
    assert tiny["anchors"] == gaps["anchors"] == 4 and toy["anchors"] == 2
    assert toy == report


def run(command, folder):
    """The JSON document that a command prints last."""
    words = shlex.split(command)
    assert words[0] == "python"
    run = subprocess.run([sys.executable, *words[1:]], cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_the_test_command():
    assert "pip install -e '.[test]' && python -m pytest" in COMMANDS


def test_flags_in_the_readme_exist():
    common = {"program.parser": "reference/program.py", "program.new_parser": "fast/training_program.py"}
    for command in COMMANDS:
        if example := re.search(r"examples/\w+\.py", command):
            source = (ROOT / example[0]).read_text()
            source += "".join((ROOT / file).read_text() for name, file in common.items() if name in source)
            for flag in re.findall(r" --[a-z-]+", command.split("pip install -e .", 1)[-1]):
                assert f'"{flag[1:]}"' in source, f"{flag} is no flag of {example[0]}"


def test_every_folder_on_the_map_exists():
    for name in re.findall(r"^\| `([a-z]+/)` \|", README, flags=re.M):
        assert (ROOT / name).is_dir()
