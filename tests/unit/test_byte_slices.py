"""Values as slices of one buffer are the values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from frazil.arrow.byte_slices import ByteSlices
from frazil.native.memory import SLACK

VALUES = [b"one", None, b"", b"\0three", "fünf".encode()]


def test_slices_are_a_sequence_of_the_values():
    slices = ByteSlices.of(VALUES)
    assert list(slices) == VALUES
    assert [slices[i] for i in range(len(slices))] == VALUES
    assert slices[-1] == VALUES[-1]
    assert list(slices[1:4]) == VALUES[1:4]
    assert list(slices.take(np.array([4, 0, 0]))) == [VALUES[4], b"one", b"one"]
    assert slices.nulls.tolist() == [False, True, False, False, False]
    assert slices.to_arrow().equals(pa.array(VALUES, pa.large_binary()))


def test_slices_of_slices_are_not_copied():
    slices = ByteSlices.of(VALUES)
    assert ByteSlices.of(slices) is slices
    assert slices[2:].data is slices.data


def test_bytes_behind_the_last_value_can_be_read():
    slices = ByteSlices.of(VALUES)
    assert len(slices.data) == sum(len(value or b"") for value in VALUES) + SLACK


def test_no_values_are_an_empty_sequence():
    assert list(ByteSlices.of([])) == []
