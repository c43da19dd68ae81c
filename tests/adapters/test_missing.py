"""An adapter whose framework is not installed says what installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("adapter", "framework"), [("keyvalue", "key_value"), ("cachelib", "cachelib"), ("langgraph", "langgraph")]
)
def test_the_extra_is_named(adapter: str, framework: str) -> None:
    # None stands for a module that is not there.
    script = f"import sys; sys.modules[{framework!r}] = None; import limpet.adapters.{adapter}"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ModuleNotFoundError: limpet.adapters.{adapter} needs {framework}")
    assert f"pip install 'limpet[{adapter}]'" in last
