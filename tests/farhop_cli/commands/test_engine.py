"""The options of `farhop engine`: each reaches the settings, and help names the defaults that these have."""

import re

from farhop_cli import engine
from farhop_lab.engine.settings import EngineSettings


def test_options_reach_the_settings(cli, monkeypatch):
    asked = []
    monkeypatch.setattr(engine, "run", asked.append)
    assert cli.run("engine", "--adapter", "a", "--adapter", "b", "--lora-load-ms", "5", "--wide").exit_code == 0
    given = {name: value for name, value in asked[0].items() if value is not None}
    assert given == {"ports": [8001], "adapters": ["a", "b"], "lora_load_ms": 5.0, "wide": True}


def test_help_names_the_defaults_of_the_settings(cli):
    defaults = {name: field.default for name, field in EngineSettings.model_fields.items()}
    text = " ".join(cli.run("engine", "--help").stdout.split())
    named = {
        m[1].replace("-", "_"): m[2]
        for m in re.finditer(r"--([a-z-]+) [A-Z]+ [^-]*?Default: ([\w-]+(?:\.[\w-]+)*)", text)
    }
    known = {name: said for name, said in named.items() if name not in ("port", "kv_blocks")}  # 8001; the GPU's
    assert len(known) > 8
    assert {name: str(defaults[name]).removesuffix(".0") for name in known} == known


def test_a_tokenizer_is_written_and_nothing_runs(cli, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "run", lambda _given: 1 / 0)
    assert cli.run("engine", "--write-tokenizer", str(tmp_path)).exit_code == 0
    assert (tmp_path / "tokenizer.json").exists()
