"""Rules of a config: small checks, each of the settings that it names.

In: rules, which raise `ConfigError`. Out: the first error, for a config that is about to be used;
or every error, for `frazil check`. Promised: a rule that reads a setting at fault is left out, so
that no consequence of an error is listed as another one. Rules of one setting, or of one item of a
list, come before those of several. Asks no server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from frazil.config.messages import within
from frazil.errors import ConfigError

#: A setting: section, number where there are several, key, and number or key of an item.
Path = tuple[str, ...]
#: As the last word: whether the section or setting is there, whatever stands in it.
PRESENCE = ""


@dataclass(frozen=True, slots=True)
class Rule:
    #: raises ConfigError
    check: Callable[[], object]
    #: that it reads
    settings: tuple[Path, ...]


#: A check, and the settings of one section that it reads, as `under` takes them.
Checked = tuple[Callable[[], object], Sequence[Path | str]]


def under(section: Path, rules: Iterable[Checked]) -> Iterator[Rule]:
    """Rules of one section: a setting is a key of it, or the path of an item below; one that begins
    with `/` is a whole path."""
    for check, settings in rules:
        yield Rule(_within(section, check), tuple(_whole(section, name) for name in settings))


def _whole(section: Path, name: Path | str) -> Path:
    if isinstance(name, str) and name.startswith("/"):
        return tuple(name[1:].split("/"))
    return (*section, *((name,) if isinstance(name, str) else name))


def _within(section: Path, check: Callable[[], object]) -> Callable[[], object]:
    def checked() -> None:
        with within(*section):
            check()

    return checked


def require(rules: Iterable[Rule]) -> None:
    """Raises the first error."""
    for rule in rules:
        rule.check()


def errors_of(rules: Iterable[Rule], faults: set[Path]) -> Iterator[ConfigError]:
    """Every error that is no consequence of another. `faults`: settings that are known to be wrong;
    those that are found are added."""
    for rule in sorted(rules, key=lambda rule: len(rule.settings)):
        if any(at_fault(setting, faults) for setting in rule.settings):
            continue
        try:
            rule.check()
        except ConfigError as error:
            one = len(rule.settings) == 1 or len(error.path) < 2
            faults.update(rule.settings if one else [error.path])
            yield error


def at_fault(setting: Path, faults: Iterable[Path]) -> bool:
    """Is it, a section or list that it is in, or an item of it wrong?"""
    return any(
        setting[: len(fault)] == fault or fault[: len(setting)] == setting for fault in faults
    )
