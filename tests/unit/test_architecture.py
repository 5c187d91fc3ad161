"""The rules of the tree, held over the source's syntax: who may import whom, and who touches the
JVM."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import frazil

ROOT = Path(frazil.__file__).parent
#: The chapters, from the ground up: each may import from itself and from those before it.
CHAPTERS = (
    "errors",
    "format_version",
    "offsets",
    "accounting",
    "steps",
    "retry",
    "render",
    "config",
    "logs",
    "native",
    "arrow",
    "kafka",
    "formats",
    "files",
    "iceberg.table",  # the values of a table, and its interface: the ledger reads it
    "ledger",
    "pipeline",
    "iceberg",
    "iceberg.maintenance_tasks",  # the work on tables between commits: called by `commit` alone
    "iceberg.rewrite_data_files",
    "spark",
    "sources",
    "commit",
    "run",
    "sink",
    "auditing",
    "monitoring",
    "ops",
    "sql",
    "service",
    "testing",
    "cli",
    "__main__",
)
#: Chapters that run on executors, and modules in them that run on the driver and may know Spark.
EXECUTORS = (
    "errors",
    "format_version",
    "offsets",
    "accounting",
    "native",
    "arrow",
    "kafka",
    "formats",
    "files",
    "pipeline",
)
DRIVER = ("kafka.range_source", "formats.schema_sample")
#: The proof must not lean on what it proves, nor either of them on maintenance.
MAINTENANCE = ("iceberg.maintenance_tasks", "iceberg.rewrite_data_files")
APART = ("commit", "auditing", *MAINTENANCE)
JVM = {"_jvm", "_jsc", "_jdf", "_jsparkSession", "_gateway", "_jwrapped", "_jc"}

#: Imports inside functions: module → how many there may be, and why.
LATE = {
    "": 16,  # `import frazil` loads nothing heavy; its functions load Spark when they are called
    "iceberg.static_table": 4,  # local files are read without paying for pyiceberg's import
    "iceberg.file_io": 1,  # the same
    "iceberg.metadata_location": 5,  # the same, and psycopg is there or not
    "cli.app": 6,  # a command loads what it needs: `frazil --help` answers at once
    "cli.check": 3,  # the same
    "cli.commands": 23,  # a command loads what it needs: `frazil --help` answers at once
    "cli.export": 5,  # the same
    "cli.init": 2,  # the same
    "cli.sql": 3,  # the same, and the prompt only where somebody types
    "cli.sql_session": 2,  # VALIDATE and AUDIT load clients of servers, the others do not
    "monitoring.metrics_observer": 1,  # OpenTelemetry is an extra
    "cli.health": 1,  # the same
    "spark.open_table": 2,  # Spark only where it is needed
    "auditing.evidence": 1,  # and Kafka's client only where the broker is asked
    "testing.process": 5,  # the parent process, which also imports it, needs no Spark
    "arrow.lazy_polars": 1,  # only where it is used, and after a worker is forked
    "spark.worker_daemon": 1,  # what is imported before the fork is chosen line by line
    "spark.jars": 1,  # a broker's jars are fetched without paying for Spark's import
}
#: Imports by name at run time: module → how many.
DYNAMIC = {
    "kafka.security": 1,  # `oauth_cb` names the user's own module
    "pipeline.routing": 1,  # `[[route]]` and `[transform] python` name the user's own module
    "formats.schema_registry": 3,  # the registry's client is heavy and comes with confluent-kafka
    "native.warm_up": 1,  # all modules of the chapter
    "testing": 1,  # users' names are imported at their first use
    "spark.worker_daemon": 2,  # only for the workers' daemon
}
#: Handlers of `Exception` or wider below the sink: module → how many.
BROAD = {
    "spark.session": 1,  # what Java raises before there is a session is not PySpark's error yet
    "commit.table_maintenance": 1,  # no failure of maintenance stops the stream
    "commit.committer": 1,  # the committer's thread: what is not ours must still stop the stream
    "pipeline.routing": 1,  # a user's function may raise anything
    # the net: whatever a record does to a step, it is found and rejected
    "pipeline.isolation": 1,
    "commit.completeness_callback": 1,  # and so may the callback of complete hours
    "iceberg.metadata_location": 1,  # raised again on the thread that waits for the answer
}
#: The most lines of a function and of a module, and the most methods and attributes of a class.
FUNCTION_LINES, MODULE_LINES, METHODS, ATTRIBUTES = 60, 700, 25, 15
#: Classes that exceed a limit: class → (methods, attributes), and why.
LARGE = {
    "config.sections.SinkConfig": (0, 21),  # one attribute for each key of [sink]
    "config.sections.TableConfig": (1, 34),  # one attribute for each key of [[table]]
    "steps.Step": (0, 16),  # one attribute for each fact that a step tells
    "ledger.entry.LedgerEntry": (10, 20),  # one attribute for each key that a snapshot stores
    "ledger.staged_batch.StagedBatch": (4, 16),  # one attribute for each key of a batch record
    "pipeline.table_plan.TablePlan": (6, 17),  # the input of tasks for one table, pickled at once
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {name_of(path): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
MODULES = [name for name, tree in TREES.items() if name and tree.body]


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of all that is imported, wherever it stands; `from a import b` gives a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def ours(name: str) -> frozenset[str]:
    """The modules of Frazil that a module imports."""
    modules = {module.removeprefix("frazil.") for module in imported(TREES[name])}
    return frozenset(modules & set(MODULES) - {name})


@cache
def reached(name: str) -> frozenset[str]:
    """The same, and what those import, and so on."""
    modules: set[str] = set()
    waiting = [name]
    while waiting:
        for module in ours(waiting.pop()) - modules:
            modules.add(module)
            waiting.append(module)
    return frozenset(modules)


def outside(name: str) -> set[str]:
    """Packages that a module needs, itself or through other modules of ours."""
    return {
        package.split(".")[0]
        for module in {name, *reached(name)}
        for package in imported(TREES[module])
    }


def chapter(name: str) -> str:
    return name if name in CHAPTERS else name.split(".")[0]


def test_the_source_is_seen():
    assert {"config.model", "pipeline.task", "iceberg.java", "sink", "cli.commands"} <= set(MODULES)
    assert {"kafka.fetch", "errors"} <= ours("pipeline.task")
    assert "ledger.entry" in reached("cli.commands")


def test_every_module_belongs_to_a_chapter():
    assert {chapter(name) for name in MODULES} == set(CHAPTERS)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str):
    position = CHAPTERS.index(chapter(name))
    assert [module for module in ours(name) if CHAPTERS.index(chapter(module)) > position] == []


def test_no_module_imports_itself_in_a_circle():
    assert [name for name in MODULES if name in reached(name)] == []


def test_the_core_needs_nothing_but_the_standard_library():
    allowed = {"frazil", "tomli", "tomllib"}  # tomli is what tomllib is called before Python 3.11
    for name in MODULES:
        if chapter(name) in ("errors", "format_version", "offsets", "config"):
            assert outside(name) - sys.stdlib_module_names <= allowed, name


@pytest.mark.parametrize("name", [n for n in MODULES if chapter(n) in APART])
def test_commit_audit_and_maintenance_do_not_depend_on_each_other(name: str):
    others = {chapter(other) for other in reached(name)} & set(APART) - {chapter(name)}
    assert others <= (set() if chapter(name) == "auditing" else set(MAINTENANCE))


def test_nothing_that_is_proven_imports_the_audit():
    proven = [n for n in MODULES if CHAPTERS.index(chapter(n)) <= CHAPTERS.index("sink")]
    assert [n for n in proven if any(chapter(m) == "auditing" for m in reached(n))] == []


@pytest.mark.parametrize(
    "name", [n for n in MODULES if chapter(n) in EXECUTORS and n not in DRIVER]
)
def test_what_runs_on_executors_needs_neither_spark_nor_py4j(name: str):
    assert outside(name).isdisjoint({"pyspark", "py4j"})


@pytest.mark.parametrize("name", [n for n in MODULES if not n.startswith("iceberg.java")])
def test_only_the_java_modules_touch_the_jvm(name: str):
    touched = {n.attr for n in ast.walk(TREES[name]) if isinstance(n, ast.Attribute)} & JVM
    texts = {n.value for n in ast.walk(TREES[name]) if isinstance(n, ast.Constant)}
    assert touched == set()
    assert JVM.isdisjoint(t for t in texts if isinstance(t, str))  # getattr(spark, "_jvm")
    packages = {module.split(".")[0] for module in imported(TREES[name])}
    assert "py4j" not in packages
    assert "pyspark.java_gateway" not in set(imported(TREES[name]))


def test_the_java_modules_do_touch_the_jvm():
    attributes = {n.attr for n in ast.walk(TREES["iceberg.java"]) if isinstance(n, ast.Attribute)}
    assert attributes & JVM


#: Modules below `ops` that know Spark, besides the chapter `spark`: module → what for.
KNOWING = {
    "sink": "drives the query",
    "run": "Spark's own handle of a query",
    "commit.startup": "hands the session to the source",
    "sources.factory": "a DataFrame, or the stream of the config",
    "iceberg.java": "the catalogs of a session, with Py4J",
    "iceberg.java_errors": "errors of PySpark are translated, too",
    "iceberg.java_spark": "the parts of Spark that only Java exposes",
    "kafka.range_source": "Spark's DataSource of ranges",
    "sources.base": "what a source is: a DataFrame comes in",
    "sources.kafka": "a DataFrame of ranges",
    "sources.batch_plans": "a function of a [[route]] is pickled by value",
    "sources.range_tasks": "ranges as tasks",
    "sources.dataframe": "any DataFrame",
    "sources.dead_letters": "a DataFrame of dead letters",
    "sources.operator_decision": "a batch without records is a DataFrame, too",
}


def test_only_a_few_modules_know_spark():
    knowing = {n for n in MODULES if "pyspark" in {i.split(".")[0] for i in imported(TREES[n])}}
    below = CHAPTERS[: CHAPTERS.index("ops")]
    assert {n for n in knowing if chapter(n) in below and chapter(n) != "spark"} == set(KNOWING)


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        # `frazil --help`, and a program that only wants a config, must not pay for Spark
        (
            "frazil",
            ("pyspark", "py4j", "pyarrow", "numpy", "pyiceberg", "polars", "confluent_kafka"),
        ),
        # `frazil status` answers in a second, without Spark
        ("frazil.ops.status", ("pyspark", "py4j", "pyiceberg", "pandas", "numba")),
        # Spark starts a Python process for the planner of every query
        ("frazil.kafka.range_source", ("pyarrow", "pyiceberg", "polars")),
        # Spark's worker daemon imports it before it forks: polars starts threads
        ("frazil.pipeline.task", ("polars",)),
    ],
)
def test_importing_a_module_loads_nothing_of_weight(module: str, heavy: tuple[str, ...]):
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert ended.stdout.strip() == "[]"


def late(tree: ast.Module) -> int:
    """Import statements that do not stand at the top of the module."""
    top = {id(node) for statement in tree.body for node in _with_branches(statement)}
    imports = [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    return sum(id(node) not in top for node in imports)


def _with_branches(node: ast.stmt) -> Iterator[ast.stmt]:
    """A statement, and what stands under `if sys.version_info …`, `if TYPE_CHECKING` or `try`."""
    yield node
    if isinstance(node, ast.Try):
        yield from node.body
    if isinstance(node, ast.If) and "__name__" not in ast.dump(node.test):
        for below in [*node.body, *node.orelse]:
            yield from _with_branches(below)


def test_imports_inside_functions_are_counted():
    counts = {name: count for name in ["", *MODULES] if (count := late(TREES[name]))}
    assert {name: n for name, n in counts.items() if n > LATE.get(name, 0)} == {}
    assert set(LATE) == set(counts)  # a licence nobody needs any more is taken back


def test_imports_by_name_at_run_time_are_counted():
    def count(tree: ast.Module) -> int:
        wanted = {"import_module", "__import__"}
        calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
        return sum(getattr(f, "attr", getattr(f, "id", "")) in wanted for f in calls)

    assert {name: number for name in MODULES if (number := count(TREES[name]))} == DYNAMIC


def broad(tree: ast.Module) -> int:
    """Handlers that catch `Exception`, `BaseException` or everything."""
    handlers = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            handlers += any(
                kind is None or getattr(kind, "id", "") in ("Exception", "BaseException")
                for kind in kinds
            )
    return handlers


def test_below_the_sink_nothing_catches_everything():
    below = [name for name in MODULES if CHAPTERS.index(chapter(name)) < CHAPTERS.index("sink")]
    assert {name: count for name in below if (count := broad(TREES[name]))} == BROAD


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_named_by_one_or_two_nouns_and_says_what_it_is(name: str):
    words = name.split(".")[-1].strip("_").split("_")
    assert len(words) <= 3
    assert all(word.isalnum() and word.islower() for word in words)
    assert not {"models", "utils", "common", "helpers", "misc"} & set(words)
    assert ast.get_docstring(TREES[name])


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def lines_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def size_of(cls: ast.ClassDef) -> tuple[int, int]:
    """Methods of a class; attributes that its body declares or its methods assign."""
    methods = [n for n in cls.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    attributes = {
        node.attr
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    declared = [node.target for node in cls.body if isinstance(node, ast.AnnAssign)]
    attributes |= {target.id for target in declared if isinstance(target, ast.Name)}
    return len(methods), len(attributes)


def test_sizes_are_counted():
    """Else a limit holds because nothing is seen."""
    body = "\n".join(f"        self.a{n} = {n}" for n in range(20))
    tree = ast.parse(f"class A:\n    b: int\n    def f(self):\n{body}\n    async def g(self): ...")
    [cls] = classes(tree)
    assert size_of(cls) == (2, 21)
    assert [lines_of(node) for node in functions(tree)] == [21, 1]


@pytest.mark.parametrize("name", ["", *MODULES])
def test_functions_and_modules_are_short(name: str):
    sizes = [(node.name, lines_of(node)) for node in functions(TREES[name])]
    assert [(function, lines) for function, lines in sizes if lines > FUNCTION_LINES] == []
    path = Path(ROOT, *name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert len(file.read_text().splitlines()) <= MODULE_LINES


def test_classes_are_small_but_for_a_few():
    sizes = {
        f"{name}.{cls.name}": size_of(cls)
        for name in ["", *MODULES]
        for cls in classes(TREES[name])
    }
    large = {
        name: (methods, attributes)
        for name, (methods, attributes) in sizes.items()
        if methods > METHODS or attributes > ATTRIBUTES
    }
    assert large == LARGE  # one that became smaller gets a smaller number, or leaves the table


def test_no_two_modules_have_a_class_of_one_name():
    homes: dict[str, list[str]] = {}
    for name in MODULES:
        for node in TREES[name].body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(name)
    assert {class_name: where for class_name, where in homes.items() if len(where) > 1} == {}


#: A variable is named by the noun of the thing that it holds.
PRONOUNS = {"each", "found", "mine", "theirs", "there", "here", "said", "told", "what", "whoever"}
#: The words of the glossary for these are run or epoch, and dead letters.
COINED = {"life", "lives", "letters"}
PROJECT = Path(__file__).parents[2]
SOURCES = [
    str(path.relative_to(PROJECT))
    for folder in ("src", "tests", "bench", "examples")
    for path in sorted((PROJECT / folder).rglob("*.py"))
]


def variables(tree: ast.Module) -> set[str]:
    """Names of variables, arguments and functions; methods and fields of a class are not."""
    members = {
        id(getattr(node, "target", node))
        for cls in classes(tree)
        for node in cls.body
        if isinstance(node, (ast.AnnAssign, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    nodes = [node for node in ast.walk(tree) if id(node) not in members]
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    names |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    return names | {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_variables_are_counted():
    """Else the next test holds because nothing is seen."""
    text = """
    class A:
        each: int
        def found(self, told): ...
    def there(*here, what=1): mine = [said for said in here if (life := said)]
    try: ...
    except Exception as theirs: ...
    """
    expected = {"self", "told", "there", "here", "what", "mine", "said", "life", "theirs"}
    assert variables(ast.parse(textwrap.dedent(text))) == expected


@pytest.mark.parametrize("source", SOURCES)
def test_no_variable_is_a_pronoun_or_a_coined_word(source: str):
    names = variables(ast.parse((PROJECT / source).read_text()))
    assert names & (PRONOUNS | COINED) == set()


@pytest.mark.parametrize("source", SOURCES)
def test_the_formatter_decides(source: str):
    assert not re.search(r"# fmt: (skip|off)", (PROJECT / source).read_text())


#: Words that read twice, or that nobody in the field says.
UNPLAIN = {"amiss", "told", "shall", "whoever", "whence", "thereby"}
UNPLAIN |= {"nobody", "somebody", "anew", "mend", "mends", "mended", "amid"}
PAGES = [
    str(path.relative_to(PROJECT))
    for folder in ("docs", "deploy")
    for path in sorted((PROJECT / folder).rglob("*.md"))
]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", *PAGES])
def test_prose_has_plain_words(page: str):
    prose = re.sub(r"`[^`\n]*`", "", (PROJECT / page).read_text())
    assert UNPLAIN & set(re.findall(r"[a-z]+", prose.lower())) == set()


def test_no_class_is_a_manager_or_a_helper():
    bad = ("Manager", "Helper", "Handler", "Impl", "Utils", "Factory")
    classes = [n.name for t in TREES.values() for n in ast.walk(t) if isinstance(n, ast.ClassDef)]
    assert [name for name in classes if name.endswith(bad)] == []


def test_no_test_code_is_in_the_product():
    for name in MODULES:
        packages = {module.split(".")[0] for module in imported(TREES[name])}
        assert packages.isdisjoint({"pytest", "hypothesis", "unittest", "tests"}), name
