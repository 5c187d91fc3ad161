"""What `frazil check` found: findings in the order in which an operator works them off.

In: findings of the checks. Out: a report with lines, JSON and an exit code. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text

from frazil.errors import ConfigError, FrazilError, counted
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
    "warning": ("?", "yellow"),
    "error": ("✗", "red"),
    "skipped": ("-", "dim"),
}


@dataclass(frozen=True, slots=True)
class CheckFinding:
    area: str
    #: ok, warning, error, or skipped: not checked, and why
    severity: str
    message: str
    hint: str = ""
    #: the setting at fault: section, number where there are several, key
    setting: tuple[str, ...] = ()
    #: where it stands: file and line, or a variable
    location: str = ""

    @staticmethod
    def of(
        area: str, error: FrazilError, setting: tuple[str, ...] = (), severity: str = "error"
    ) -> CheckFinding:
        path = setting
        if isinstance(error, ConfigError) and error.path:
            path = error.path
        return CheckFinding(area, severity, error.message, error.hint, path)


@dataclass
class CheckReport:
    JSON: ClassVar = "verdict sink seconds errors warnings findings"

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
    def verdict(self) -> str:
        return "errors" if self.errors else "warnings" if self.warnings else "ok"

    @property
    def exit_code(self) -> int:
        """2: the config itself is wrong; 1: something else would stop a start."""
        wrong = {finding.area for finding in self.findings if finding.severity == "error"}
        return 2 if "config" in wrong else 1 if wrong else 0

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
        skipped = sum(finding.severity == "skipped" for finding in self.findings)
        parts = [counted(self.errors, "error"), counted(self.warnings, "warning")]
        parts += [f"{skipped} not checked"] if skipped else []
        yield f"sink {self.sink}: {', '.join(parts)}; {self.seconds:.1f} s"
