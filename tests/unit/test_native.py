"""Compiled code: what loads and stores do, where their machine code is kept, what is checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from frazil.native import compiler
from frazil.native.compiler import compiled
from frazil.native.memory import (
    double_bits,
    load1,
    load2,
    load4,
    load8,
    move16,
    store1,
    store2,
    store4,
    store8,
)


@compiled
def swept(source: int, target: int) -> int:
    store1(target, load1(source + 1))
    store2(target + 1, load2(source + 1))
    store4(target + 3, load4(source + 1))
    store8(target + 7, load8(source + 1))
    move16(target + 15, source + 3)
    store8(target + 31, double_bits(0.5))
    return load1(source) + load2(source) + load4(source)


def test_loads_and_stores_need_no_alignment_and_are_unsigned_below_eight_bytes() -> None:
    source = np.frombuffer(bytes(range(250, 256)) + bytes(range(50)), np.uint8).copy()
    target = np.zeros(64, np.uint8)
    raw = source.tobytes()
    total = swept(source.ctypes.data, target.ctypes.data)
    assert total == sum(int.from_bytes(raw[:size], "little") for size in (1, 2, 4))
    half = np.float64(0.5).tobytes()
    assert target.tobytes() == (
        raw[1:2] + raw[1:3] + raw[1:5] + raw[1:9] + raw[3:19] + half + bytes(25)
    )


#: A program with one cached function: where it was found, what it returned, what faults it made.
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
from frazil.native import compiler, memory
from frazil.native.memory import load1

@compiler.cached("int64(int64, int64)")
def total(address, size):
    sum = 0
    for i in range(size):
        sum += load1(address + i)
    return sum

data = np.ones(8, np.uint8)
memory.watch([(data.ctypes.data, 5)])
compiler.warm_up()
hits = sum(total.stats.cache_hits.values())
print(total(data.ctypes.data, 8), hits, memory.faults()[0])
"""


def run(folder: Path, **environment: str) -> list[int]:
    script = folder / "program.py"
    script.write_text(PROGRAM.format(folder=str(folder)))
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [int(number) for number in ended.stdout.split()]


def test_machine_code_is_cached_broken_caches_and_read_only_ones_are_survived(
    tmp_path: Path,
) -> None:
    for file in (compiler.CHAPTER / "__pycache__").rglob("program.*.nb?"):
        file.unlink()  # of the last line here, when this test ran before
    cache = tmp_path / "cache"
    assert run(tmp_path, FRAZIL_CACHE=str(cache)) == [8, 0, 0]
    [code] = cache.rglob("*.nbc")
    assert code.parent.name == compiler.chapter_hash()
    assert run(tmp_path, FRAZIL_CACHE=str(cache)) == [8, 1, 0]
    code.write_bytes(code.read_bytes()[:-100])
    assert run(tmp_path, FRAZIL_CACHE=str(cache)) == [8, 0, 0]
    assert run(tmp_path, FRAZIL_CACHE="/proc/none", PYTHONDONTWRITEBYTECODE="1")[0] == 8


def test_another_source_of_the_chapter_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one.py").write_text("a = 1")
    monkeypatch.setattr(compiler, "CHAPTER", tmp_path)
    compiler.chapter_hash.cache_clear()
    before = compiler.folders()
    (tmp_path / "two.py").write_text("b = 1")
    compiler.chapter_hash.cache_clear()
    after = compiler.folders()
    compiler.chapter_hash.cache_clear()
    assert not set(before) & set(after)


def test_the_checked_mode_sees_accesses_outside_the_buffers(tmp_path: Path) -> None:
    total, _, faults = run(tmp_path, FRAZIL_NATIVE_CHECKED="1", FRAZIL_CACHE=str(tmp_path))
    assert (total, faults) == (5, 3)
    assert not list(tmp_path.rglob("*.nbc"))
