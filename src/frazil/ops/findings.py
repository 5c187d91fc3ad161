"""What `frazil check` found: findings in the order in which an operator works them off.

In: findings of the checks. Out: a report with lines, JSON and an exit code. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text

from frazil.errors import TRY_AGAIN, ConfigError, FrazilError, NotProven, counted
from frazil.render import Line

#: What is checked, in the order in which errors are worked off: each may hide errors behind it.
AREAS = (
    "config",
    "secrets",
    "java",
    "broker",
    "topics",
    "group",
    "registry",
    "catalog",
    "storage",
    "position",
    "tables",
    "records",
)
_SIGNS = {
    "ok": ("✓", "green"),
    "note": ("·", "dim"),
    "warning": ("?", "yellow"),
    "error": ("✗", "red"),
    "skipped": ("-", "yellow"),
}


@dataclass(frozen=True, slots=True)
class CheckFinding:
    area: str
    #: ok, note (no check can tell it), warning, error, or skipped (not checked, and why)
    severity: str
    message: str
    hint: str = ""
    #: the setting at fault: section, number where there are several, key
    setting: tuple[str, ...] = ()
    #: where it stands: file and line, or a variable
    location: str = ""
    #: an error that goes away by itself: a server does not answer
    temporary: bool = False

    @staticmethod
    def of(
        area: str, error: FrazilError, setting: tuple[str, ...] = (), severity: str = "error"
    ) -> CheckFinding:
        path = setting
        if isinstance(error, ConfigError) and error.path:
            path = error.path
        temporary = error.exit_code == TRY_AGAIN
        return CheckFinding(area, severity, error.message, error.hint, path, temporary=temporary)


@dataclass
class CheckReport:
    JSON: ClassVar = "verdict sink seconds errors warnings not_run findings"

    sink: str
    findings: Sequence[CheckFinding] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.findings = sorted(self.findings, key=lambda finding: AREAS.index(finding.area))

    @property
    def errors(self) -> int:
        return sum(finding.severity == "error" for finding in self.findings)

    @property
    def warnings(self) -> int:
        return sum(finding.severity == "warning" for finding in self.findings)

    @property
    def not_run(self) -> int:
        return sum(finding.severity == "skipped" for finding in self.findings)

    @property
    def verdict(self) -> str:
        if self.errors:
            return "errors"
        return "incomplete" if self.not_run else "warnings" if self.warnings else "ok"

    @property
    def exit_code(self) -> int:
        """2: the config itself is wrong; 1: something else would stop a start; 75: only servers
        that do not answer would; 3: nothing is wrong, and not everything was checked."""
        wrong = [finding for finding in self.findings if finding.severity == "error"]
        if any(finding.area in ("config", "secrets") for finding in wrong):
            return ConfigError.exit_code
        if wrong:
            return TRY_AGAIN if all(finding.temporary for finding in wrong) else 1
        return NotProven.exit_code if self.not_run else 0

    def lines(self) -> Iterator[Line]:
        for finding in self.findings:
            sign, colour = _SIGNS[finding.severity]
            location = (
                f" ({finding.location})"
                if finding.location and finding.location not in finding.message
                else ""
            )
            yield Text.assemble(
                (f"{sign} ", colour),
                (f"{finding.area:<9}", "bold"),
                f"{finding.message}{location}",
            )
            for line in finding.hint.splitlines():
                yield Text(
                    f"{'':<11}hint: {line}"
                    if line == finding.hint.splitlines()[0]
                    else f"{'':<17}{line}"
                )
        parts = [counted(self.errors, "error"), counted(self.warnings, "warning")]
        if self.not_run:
            skipped = [finding for finding in self.findings if finding.severity == "skipped"]
            why = "; ".join(f"{f.area}: {f.hint or f.message}".splitlines()[0] for f in skipped)
            parts.append(f"{counted(self.not_run, 'check')} not run ({why})")
        yield f"sink {self.sink}: {', '.join(parts)}; {self.seconds:.1f} s"
