"""Reads Iceberg's files without a JVM: bytes, Parquet sources, Avro records.

Local files are opened directly; other stores are read with pyiceberg's file IO, imported on first
use. A file that cannot be read raises one of our errors, without the store's credentials in it.
"""

from __future__ import annotations

import bz2
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.fs

from frazil.arrow.avro_datum import Datum, UnreadableDatum
from frazil.config.settings import SECRET
from frazil.errors import (
    ConfigError,
    Fatal,
    IdentityMismatch,
    Unavailable,
    passwords_in,
    without_passwords,
)

_SYNC = b"frazil----frazil"


class NeedsSpark(ConfigError):
    """This catalog or store cannot be opened without Spark; Iceberg for Spark may support it."""


class FileStore:
    """Reads the files of a catalog. `properties` of the catalog or its file IO may hold
    credentials."""

    def __init__(self, properties: Mapping[str, str]) -> None:
        self.properties = properties
        self._ios: dict[str, Any] = {}

    def io(self, path: str) -> Any:
        """pyiceberg's file IO for the path's scheme."""
        scheme = path.partition("://")[0]
        if scheme not in self._ios:
            from frazil.files.writer import file_io

            self._ios[scheme] = file_io(path, self.properties)
        return self._ios[scheme]

    def read(self, path: str) -> bytes:
        with self.reading(path):
            if local_path := local(path):
                with open(local_path, "rb") as file:
                    return file.read()
            with self.io(path).new_input(path).open() as stream:
                return bytes(stream.read())

    def write(self, path: str, content: bytes) -> None:
        """As a whole: a reader sees the old content or the new."""
        if local_path := local(path):
            folder, name = os.path.split(local_path)
            os.makedirs(folder, exist_ok=True)
            own = os.path.join(folder, f".{name}-{os.getpid()}")
            with open(own, "wb") as file:
                file.write(content)
            os.replace(own, local_path)
            return
        with self.io(path).new_output(path).create(overwrite=True) as stream:
            stream.write(content)

    def delete(self, path: str) -> None:
        if local_path := local(path):
            os.unlink(local_path)
        else:
            self.io(path).delete(path)

    def open(self, path: str) -> Any:
        """For random access; call it within `reading`."""
        local_path = local(path)
        return pa.memory_map(local_path) if local_path else self.io(path).new_input(path).open()

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder; none if the folder does not exist."""
        with self.reading(folder):
            if local_path := local(folder):
                return os.listdir(local_path) if os.path.isdir(local_path) else []
            files = self.io(folder)
            scheme, host, path = files.parse_location(folder)
            selector = pa.fs.FileSelector(path, allow_not_found=True)
            infos = files.fs_by_scheme(scheme, host).get_file_info(selector)
            return [info.base_name for info in infos]

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise IdentityMismatch(f"cannot read {path}: it does not exist") from None
        except (OSError, ValueError, NotImplementedError, ImportError, pa.ArrowException) as error:
            fact = f"cannot read {path}: {missing_file_error(error, self.properties)}"
            if isinstance(error, PermissionError) or "ACCESS_DENIED" in fact:
                hint = "check the credentials, and what the bucket allows"
                raise ConfigError(fact, hint=hint) from None
            unknown = path.startswith(("hdfs:", "viewfs:")) or "Unrecognized filesystem" in fact
            if isinstance(error, ImportError) or unknown:
                raise NeedsSpark(fact) from None
            # Arrow's own errors are not OSErrors: the bytes arrived, but are invalid.
            raise (Unavailable if isinstance(error, OSError) else Fatal)(fact) from None


def local(path: str) -> str:
    """The path of a local file; empty for any other store."""
    if path.startswith("file:"):
        return "/" + path[5:].lstrip("/")
    return "" if re.match(r"[A-Za-z][\w+.-]*:/", path) else path


def missing_file_error(error: BaseException, properties: Mapping[str, str]) -> str:
    """The first line of a library's error message, with the secrets in `properties` masked."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    for key, value in properties.items():
        if SECRET.search(key):
            for secret in filter(None, (value, value.rpartition(":")[2])):
                text = text.replace(secret, "***")
        for password in passwords_in(value):
            text = text.replace(password, "***")
    text = without_passwords(text)
    return re.sub(r"//[^/@\s]+@", "//***@", text)


# ── Avro ─────────────────────────────────────────────────────────────────────────────────────────


class AvroFile:
    """An Avro file with its blocks decompressed. Files with one schema can be read as one."""

    def __init__(self, store: FileStore, path: str) -> None:
        self.path = path
        self.rows = 0
        self.blocks: list[bytes] = []
        raw = store.read(path)
        datum = Datum(raw, 4)
        header: dict[bytes, bytes] = {}
        try:
            if raw[:4] != b"Obj\x01":
                raise ValueError("another kind of file")
            while count := datum.long():
                if count < 0:  # then the block's size in bytes comes first
                    datum.long()
                for _ in range(abs(count)):
                    key = datum.take(datum.long())
                    header[key] = datum.take(datum.long())
            mark = datum.take(16)
            self.schema, codec = header[b"avro.schema"], header.get(b"avro.codec", b"null")
            if codec not in _CODECS:
                raise ValueError(f"the codec {codec.decode(errors='replace')}")
            while datum.place < len(raw):
                self.rows += datum.long()
                self.blocks.append(_CODECS[codec](datum.take(datum.long())))
                if datum.take(16) != mark:
                    raise ValueError("a block that does not end where it should")
        except (UnreadableDatum, ValueError, KeyError, OSError, zlib.error) as error:
            raise Fatal(
                f"cannot read {path}: expected a file of Avro, found "
                f"{type(error).__name__}: {error}"
            ) from None


def frame(
    containers: Sequence[AvroFile], wanted: Mapping[str, pl.DataType] | None = None
) -> pl.DataFrame:
    """The records of containers that have one schema, as one table.

    `wanted`: the columns to read; a column that the files lack is null. The fields of a manifest
    entry's data file become columns of their own: Avro encodes a nested record as the sequence of
    its fields, and polars can skip top-level fields only.
    """
    rows = sum(container.rows for container in containers)
    if not rows:
        return pl.DataFrame(schema=wanted)
    fields = []
    try:
        for column in json.loads(containers[0].schema)["fields"]:
            inner = column["type"]["fields"] if column["name"] == "data_file" else [column]
            fields += [(field["name"], field["type"]) for field in inner]
    except (ValueError, KeyError, TypeError) as error:
        raise Fatal(
            f"cannot read {containers[0].path}: expected a schema of Avro, found "
            f"{type(error).__name__}: {error}"
        ) from None
    names = [name for name, _ in fields if wanted is None or name in wanted]
    container = _preamble(fields)
    blocks = [block for container in containers for block in container.blocks]
    size = sum(map(len, blocks))
    whole = b"".join((container, zigzag(rows), zigzag(size), *blocks, _SYNC))
    try:
        records = pl.read_avro(io.BytesIO(whole), columns=names)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        if len(containers) > 1:  # one by one, so that the error names the file
            return pl.concat([frame([container], wanted) for container in containers])
        raise Fatal(f"cannot read {containers[0].path}: {error}") from None
    return (
        records
        if wanted is None
        else records.select(
            pl.col(name).cast(kind) if name in names else pl.lit(None, kind).alias(name)
            for name, kind in wanted.items()
        )
    )


def _preamble(fields: Sequence[tuple[str, Any]]) -> bytes:
    """The beginning of an Avro container with records of `fields`."""
    named = [{"name": name, "type": kind} for name, kind in fields]
    schema = json.dumps(_numbered({"type": "record", "fields": named})).encode()
    pair = zigzag(len(b"avro.schema")) + b"avro.schema" + zigzag(len(schema)) + schema
    return b"Obj\x01" + zigzag(1) + pair + zigzag(0) + _SYNC


def zigzag(number: int) -> bytes:
    number <<= 1  # only counts and sizes: never negative
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def _numbered(schema: Any) -> Any:
    """The schema with a unique name for each record and fixed, as Avro requires."""
    count = 0

    def walk(node: Any) -> Any:
        nonlocal count
        if isinstance(node, list):
            return [walk(branch) for branch in node]
        if not isinstance(node, dict):
            return node
        if node.get("type") in ("record", "fixed"):
            count += 1
            node = {"name": f"n{count}", **node}
        return {key: walk(value) for key, value in node.items()}

    return walk(schema)


def _snappy(block: bytes) -> bytes:
    number = Datum(block, 0).long()  # the size; snappy's varint is unsigned, Avro's is zigzag
    size = 2 * number if number >= 0 else -2 * number - 1
    return bytes(pa.decompress(block[:-4], size, "snappy"))  # the last 4 bytes are a checksum


def _zstandard(block: bytes) -> bytes:
    with pa.CompressedInputStream(pa.BufferReader(block), "zstd") as stream:
        return bytes(stream.read())


_CODECS: dict[bytes, Callable[[bytes], bytes]] = {
    b"null": bytes,
    b"deflate": lambda block: zlib.decompress(block, -15),
    b"snappy": _snappy,
    b"zstandard": _zstandard,
    b"bzip2": bz2.decompress,
}
