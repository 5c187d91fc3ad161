"""Maven coordinates in, a cached folder of jars out.

The Ivy that PySpark ships resolves them, so only Java and PySpark are needed, and the machine's own
Ivy and proxy settings apply. A folder appears in the cache only when it is complete (it is renamed
into place), so a second call returns at once, offline too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

from frazil.errors import ConfigError, Unavailable

ICEBERG = ("org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",)
#: S3 for Iceberg's Java side
AWS = ("org.apache.iceberg:iceberg-aws-bundle:1.12.0",)
#: the embedded catalog of the demo and the tests: Iceberg's JDBC catalog on SQLite
SQLITE = ("org.xerial:sqlite-jdbc:3.53.4.0",)
KAFKA = ("org.apache.kafka:kafka_2.13:4.3.1", "org.slf4j:slf4j-simple:1.7.36")

#: Seconds between attempts. A mirror may lack an artifact for a moment.
_PAUSES = (2.0, 10.0)


def cache_dir() -> Path:
    root = os.environ.get("FRAZIL_CACHE") or Path.home() / ".cache" / "frazil"
    return Path(root).expanduser()


def java() -> str:
    """The java command; raises with a hint how to install it."""
    home = os.environ.get("JAVA_HOME")
    candidates = [str(Path(home, "bin", "java"))] if home else []
    for candidate in [*candidates, "java"]:
        if path := shutil.which(candidate):
            return path
    raise ConfigError(
        "cannot find Java: neither JAVA_HOME nor PATH has a java command; "
        "expected Java 17 or newer",
        hint="install it, for example: apt-get install -y openjdk-17-jre-headless",
    )


def spark_command(name: str) -> str:
    """`spark-sql` and its like, from this PySpark."""
    return str(pyspark_home() / "bin" / name)


def fetch(
    coordinates: Sequence[str],
    *,
    transitive: bool = True,
    overrides: Sequence[str] = (),
    excludes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> list[Path]:
    """The jars of `coordinates` (`group:artifact:version[:classifier][@ext]`) and of their
    dependencies; with `@ext`, files of another kind too, such as `@tar.gz`.

    `overrides`: coordinates that replace the version of a dependency; `excludes`: groups that are
    already on the caller's class path.
    """
    target = _folder(coordinates, transitive, overrides, excludes)
    if not target.is_dir():
        say(f"fetching {', '.join(c.split(':', 1)[1] for c in coordinates)}")
        for pause in (*_PAUSES, None):
            try:
                _retrieve(coordinates, transitive, overrides, excludes, target)
                break
            except Unavailable:
                if pause is None:
                    raise
                say(f"not all of it was found; trying again in {pause:g} s")
                time.sleep(pause)
    return sorted(target.iterdir())


def _folder(
    coordinates: Sequence[str],
    transitive: bool,
    overrides: Sequence[str] = (),
    excludes: Sequence[str] = (),
) -> Path:
    wanted = repr((tuple(coordinates), transitive, tuple(overrides), tuple(excludes)))
    name = coordinates[0].split(":")[1] + "-" + hashlib.sha256(wanted.encode()).hexdigest()[:12]
    return cache_dir() / "jars" / name


def of_catalog(properties: Mapping[str, str]) -> list[Sequence[str]]:
    """The jars that a session needs for a catalog; each is fetched without its dependencies."""
    groups: list[Sequence[str]] = [ICEBERG]
    if "sqlite" in properties.get("uri", ""):
        groups.append(SQLITE)
    if "S3FileIO" in properties.get("io-impl", "") or any(k.startswith("s3.") for k in properties):
        groups.append(AWS)
    return groups


def cached(coordinates: Sequence[str]) -> bool:
    """Whether the jars, without their dependencies, were fetched before."""
    return _folder(coordinates, transitive=False).is_dir()


def classpath(jars: Sequence[Path]) -> str:
    return os.pathsep.join(map(str, jars))


def _retrieve(
    coordinates: Sequence[str],
    transitive: bool,
    overrides: Sequence[str],
    excludes: Sequence[str],
    target: Path,
) -> None:
    command = java()
    ivy = sorted((pyspark_home() / "jars").glob("ivy-*.jar"))
    if not ivy:
        raise ConfigError(
            "cannot fetch jars: this PySpark ships no Ivy", hint="pip install pyspark"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"cannot keep jars in {target.parent}: {error.strerror}",
            hint="set FRAZIL_CACHE to a folder that this user can write to",
        ) from None
    try:
        (work / "ivy.xml").write_text(_ivy_xml(coordinates, transitive, overrides, excludes))
        kinds = {"jar", "bundle", *(_split(coordinate)[1] for coordinate in coordinates)}
        run = _run_ivy(command, ivy[-1], work, sorted(kinds))
        libs = work / "libs"
        if run.returncode != 0 or not libs.is_dir():
            lines = (run.stdout + run.stderr).splitlines()
            why = [
                x.strip() for x in lines if "UNRESOLVED" in x or "not found" in x or "ERROR" in x
            ]
            raise Unavailable(
                f"cannot fetch {', '.join(coordinates)}: {'; '.join(why[:3]) or lines[-1:]}",
                hint="check the network, or put an Ivy settings file for your mirror in place",
            )
        try:
            libs.rename(target)
        except OSError:  # another process was first; its folder is as complete as ours
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _run_ivy(
    command: str, ivy: Path, work: Path, kinds: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run Ivy on `ivy.xml` in the folder `work`; the files go to its folder `libs`."""
    return subprocess.run(
        [
            command,
            "-jar",
            str(ivy),
            "-cache",
            str(cache_dir() / "ivy"),
            "-ivy",
            str(work / "ivy.xml"),
            "-confs",
            "default",
            "-types",
            *kinds,
            "-retrieve",
            f"{work}/libs/[artifact]-[revision](-[classifier]).[ext]",
        ],
        capture_output=True,
        text=True,
        timeout=900,
    )


def _ivy_xml(
    coordinates: Sequence[str], transitive: bool, overrides: Sequence[str], excludes: Sequence[str]
) -> str:
    rows = []
    for coordinate in coordinates:
        (org, artifact, version, *classifier), kind = _split(coordinate)
        part = (
            f'<artifact name={quoteattr(artifact)} type="{kind}" ext="{kind}" '
            f"m:classifier={quoteattr(classifier[0])}/>"
            if classifier
            else ""
        )
        rows.append(
            f"<dependency org={quoteattr(org)} name={quoteattr(artifact)} "
            f'rev={quoteattr(version)} force="true" conf="default->default" '
            f'transitive="{str(transitive).lower()}">{part}</dependency>'
        )
    rows += [f"<exclude org={quoteattr(group)}/>" for group in excludes]
    for coordinate in overrides:
        org, artifact, version = coordinate.split(":")
        rows.append(
            f"<override org={quoteattr(org)} module={quoteattr(artifact)} "
            f"rev={quoteattr(version)}/>"
        )
    return (
        '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
        '<info organisation="frazil" module="jars"/>'
        '<configurations><conf name="default"/></configurations>'
        f"<dependencies>{''.join(rows)}</dependencies></ivy-module>"
    )


def _split(coordinate: str) -> tuple[list[str], str]:
    """`group:artifact:version[:classifier][@ext]` as its parts and the kind of file."""
    parts, _, kind = coordinate.partition("@")
    return parts.split(":"), kind or "jar"


def pyspark_home() -> Path:
    import pyspark  # imported late: fetching a broker's jars should not cost Spark's import

    return Path(pyspark.__file__).parent


if __name__ == "__main__":  # `make` warms the cache with progress on stderr
    for group in (ICEBERG, SQLITE, AWS, KAFKA):
        fetch(group, transitive=group is KAFKA, say=lambda text: print(text, file=sys.stderr))
