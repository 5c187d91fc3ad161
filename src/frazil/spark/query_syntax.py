"""The query of a view, as Spark's SQL: is it one, does it end, do columns name the groups of its
rows, and does it need Spark at all?

In: a query over the table `stream`. Out: a `QuerySyntax`, or `QueryFault` with the position of what
no query has. sqlglot reads it, by its rules for Spark. Where a query uses what sqlglot is known not
to read, that is a doubt and no fault: Spark decides when the sink starts. Pure.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from sqlglot import Dialect, Token, TokenType, exp
from sqlglot.errors import ParseError, TokenError

from frazil.config.messages import nearest
from frazil.config.select import KEY, Column, Expression, Item, KeyBytes, Literal, Star

STREAM = "stream"
#: Columns of `stream` that a table has by itself.
METADATA = ("_topic", "_topic_partition", "_offset", "_timestamp")
_BEGINNINGS = ("SELECT", "WITH", "FROM", "VALUES", "TABLE", "MAP", "REDUCE", "(")
#: What Spark reads and sqlglot does not: words in a row, or a sign.
_UNREAD = (
    *("|>", ":", "FOR SYSTEM_VERSION", "FOR SYSTEM_TIME", "FOR VERSION", "FOR TIMESTAMP"),
    *("WITH (", "TABLE STREAM", "MAP ", "REDUCE "),
)
_FACTS = {"Expecting )": "expected ')'", "Expecting (": "expected '('"}
_WORDS = ("WHERE", "GROUP", "HAVING", "ORDER", "JOIN", "LEFT", "UNION", "LIMIT", "LATERAL")
#: Clauses of a SELECT that `[[table]] select` has not.
_CLAUSES = {
    "with_": "WITH",
    "joins": "JOIN",
    "laterals": "LATERAL VIEW",
    "where": "WHERE",
    "group": "GROUP BY",
    "having": "HAVING",
    "distinct": "DISTINCT",
    "qualify": "QUALIFY",
    "order": "ORDER BY",
    "sort": "SORT BY",
    "cluster": "CLUSTER BY",
    "distribute": "DISTRIBUTE BY",
    "limit": "LIMIT",
    "offset": "OFFSET",
    "windows": "WINDOW",
    "hint": "a hint",
}


class QueryFault(Exception):
    def __init__(self, at: int, fact: str) -> None:
        super().__init__(fact)
        self.at, self.fact = at, fact


@dataclass(frozen=True)
class QuerySyntax:
    #: why sqlglot could not read it; empty: it could
    doubt: str = ""
    #: position, and what keeps its rows from ever being final
    endless: tuple[int, str] | None = None
    #: the columns, where it is a list of them and no more
    items: tuple[Item | Star, ...] = ()
    #: what it has that `[[table]] select` has not
    beyond: str = ""
    #: if it is one aggregation of the stream: of each group the columns that hold it
    groups: tuple[tuple[str, ...], ...] = ()
    #: position, and why the rows of its groups cannot be replaced by a key
    unkeyed: tuple[int, str] | None = None
    #: do its rows have topic, partition, offset and timestamp of their record?
    of_records: bool = False


@lru_cache(256)
def read_query(text: str) -> QuerySyntax:
    dialect = Dialect.get_or_raise("spark")
    try:
        tokens = list(dialect.tokenize(text))
    except TokenError:
        return QuerySyntax(doubt="its signs are none that sqlglot knows", beyond="an unknown sign")
    first = tokens[0].text.upper() if tokens else ""
    if first not in _BEGINNINGS:
        begins = tokens[0].text[:40] if tokens else "nothing"
        raise QueryFault(0, f"expected SELECT, found {begins}{_near(first)}")
    kept, watermarks = _without_watermarks(tokens)
    for token, behind in pairwise(tokens):
        if token.token_type is TokenType.COMMA and behind.token_type in _NO_COLUMN:
            raise QueryFault(behind.start, f"expected a column behind ',', found {behind.text}")
    words = " ".join(token.text.upper() for token in tokens) + " "
    unread = next((f"{word!s}".strip() for word in _UNREAD if f" {word}" in f" {words}"), "")
    try:
        (tree,) = dialect.parser().parse(kept, text)
        if not isinstance(tree, exp.Query):
            raise ParseError("expected a query")
    except (ParseError, ValueError, RecursionError) as error:
        if unread:
            return QuerySyntax(doubt=f"sqlglot does not read {unread}", beyond=unread)
        raise _fault(error, kept) from None
    if isinstance(tree, exp.Select) and not tree.expressions:
        raise QueryFault(tokens[0].end + 1, "expected columns behind SELECT")
    try:
        items, beyond = tuple(_items(tree)), ""
        if watermarks or not items:
            raise _Beyond("WATERMARK" if watermarks else "no column of the value")
    except _Beyond as other:
        items, beyond = (), str(other)
    faults = list(_endless(tree, tokens, watermarks))
    inside = [fault for select, fault in faults if select is not tree]
    groups, unkeyed = ((), None) if inside else _groups(tree, tokens)
    endless = next(iter(inside), faults[0][1] if faults else None)
    return QuerySyntax("", endless, items, beyond, groups, unkeyed, _of_records(tree))


def _near(word: str) -> str:
    near = nearest(word, ("SELECT", "WITH", "FROM"))
    return near if near.startswith("; did you mean") else ""


def _fault(error: Exception, tokens: Sequence[Token]) -> QueryFault:
    if isinstance(error, RecursionError):
        return QueryFault(0, "the query is nested too deeply")
    places = getattr(error, "errors", None) or [{}]
    line, column = places[0].get("line"), places[0].get("col")
    for number, token in enumerate(tokens):
        if (token.line, token.col) == (line, column):
            fact = str(places[0]["description"])
            fact = _FACTS.get(fact.split(":")[0], "no query of Spark goes on like this")
            token_text = f", found {token.text[:40]}"
            if token is tokens[-1] and fact not in _FACTS.values():
                fact, token_text = f"the query ends too early, or with {token.text[:40]}", ""
            before = tokens[number - 1].text.upper() if number else ""
            near = difflib.get_close_matches(before, _WORDS, n=1, cutoff=0.7)
            meant = f"; did you mean {near[0]}?" if near and near[0] != before else ""
            return QueryFault(token.start, f"{fact}{token_text}{meant}")
    return QueryFault(0, "this is no query of Spark")


def _without_watermarks(tokens: Sequence[Token]) -> tuple[list[Token], set[str]]:
    """The tokens without `WATERMARK column DELAY OF INTERVAL …`, which sqlglot does not know, and
    the columns; `window` is a function before a parenthesis."""
    kept: list[Token] = []
    columns: set[str] = set()
    at = 0
    while at < len(tokens):
        token = tokens[at]
        words = [t.text.upper() for t in tokens[at : at + 200]]
        if words[0] == "WATERMARK" and "DELAY" in words and kept:
            delay = words.index("DELAY")
            columns.add(tokens[at + delay - 1].text.lower())
            at += delay + 2 + (words[delay + 2 : delay + 3] == ["INTERVAL"])
            while at < len(tokens) and tokens[at].token_type in (
                TokenType.NUMBER,
                TokenType.STRING,
                TokenType.DASH,
            ):
                at += 1
                while at < len(tokens) and tokens[at].text.upper().rstrip("S") in _UNITS:
                    at += 1
            continue
        if token.token_type is TokenType.WINDOW and words[1:2] == ["("]:
            token = Token(TokenType.VAR, token.text, token.line, token.col, token.start, token.end)
        kept.append(token)
        at += 1
    return kept, columns


_NO_COLUMN = (TokenType.FROM, TokenType.WHERE, TokenType.GROUP_BY, TokenType.R_PAREN)
_UNITS = {"MICROSECOND", "MILLISECOND", "SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "YEAR"}
_UNITS |= {"TO"}


# ── does it end? ─────────────────────────────────────────────────────────────────────────────────


def _endless(
    tree: Any, tokens: Sequence[Token], watermarks: set[str]
) -> Iterator[tuple[exp.Select, tuple[int, str]]]:
    """Rows over all of the stream are never final. Groups that end are those of a time window, or
    of the column of a watermark. (Groups of a table may be what they are, and what comes out of a
    query inside is left to Spark.)"""
    streams = {STREAM}
    for cte in tree.find_all(exp.CTE):
        if _tables(cte.this) & streams:
            streams.add(cte.alias.lower())
    for select in tree.find_all(exp.Select):
        sources = [select.args.get("from_"), *(select.args.get("joins") or [])]
        read = set().union(*(_tables(source) for source in sources if source))
        if not read & streams:
            continue
        direct = any(
            isinstance(source.this, exp.Table) and source.this.name.lower() == STREAM
            for source in sources
            if source
        )
        if fault := _endless_rows(select, tokens, watermarks, direct):
            yield select, fault


def _endless_rows(
    select: exp.Select, tokens: Sequence[Token], watermarks: set[str], direct: bool
) -> tuple[int, str] | None:
    def ends(keys: Sequence[Any]) -> bool:
        nodes = [node for key in keys for node in key.find_all(exp.Column, exp.Anonymous)]
        timed = any(
            node.name.lower() in (*watermarks, "window", "session_window", "window_time")
            or (isinstance(node, exp.Column) and node.table.lower() == "window")
            for node in nodes
        )
        return bool(watermarks) and (timed or not direct)

    outputs = list(select.expressions)
    aggregates = [node for item in outputs for node in _own(item, exp.AggFunc)]
    group = select.args.get("group")
    if group is not None:
        keys = [node for node in group.find_all(exp.Column, exp.Anonymous) if node is not group]
        if group.args.get("all"):
            keys = [item for item in outputs if not list(_own(item, exp.AggFunc))]
        numbers = [key for key in group.expressions if isinstance(key, exp.Literal)]
        if not ends([*keys, *(outputs[int(n.this) - 1] for n in numbers if _number(n, outputs))]):
            return _place(tokens, TokenType.GROUP_BY, group), "the groups"
    elif aggregates:
        return _start(aggregates[0], tokens), f"{aggregates[0].sql_name().lower()} of all rows"
    if select.args.get("distinct") and not ends(outputs):
        return _place(tokens, TokenType.DISTINCT, select), "the rows that are DISTINCT"
    if over := next((node for item in outputs for node in _own(item, exp.Window)), None):
        return _start(over, tokens), "the rows that OVER compares"
    return None


def _groups(
    tree: Any, tokens: Sequence[Token]
) -> tuple[tuple[tuple[str, ...], ...], tuple[int, str] | None]:
    """The columns that hold each group of an aggregation that is the whole query; or why a row
    cannot be replaced by them."""
    group = tree.args.get("group") if isinstance(tree, exp.Select) else None
    if group is None or STREAM not in _tables(tree):
        return (), None
    at = _place(tokens, TokenType.GROUP_BY, group)
    if tree.args.get("having"):
        having = _place(tokens, TokenType.HAVING, tree.args["having"])
        return (), (having, "a group that HAVING leaves out would keep its former row")
    outputs = list(tree.expressions)
    other = [
        words for key, words in _CLAUSES.items() if key in _AFTER_GROUPS and tree.args.get(key)
    ]
    other += [key.upper() for key in ("rollup", "cube", "grouping_sets") if group.args.get(key)]
    other += ["OVER" for item in outputs for _ in _own(item, exp.Window)]
    if other:
        return (), (at, f"{other[0]} is not for groups whose rows are replaced")
    keys = list(group.expressions)
    if group.args.get("all"):
        keys = [_plain(item) for item in outputs if not list(_own(item, exp.AggFunc))]
    keys = [_plain(outputs[int(k.this) - 1]) if _number(k, outputs) else k for k in keys]
    groups = tuple(_columns_of(key, outputs) for key in keys)
    for key, names in zip(keys, groups, strict=True):
        if not names:
            return (), (at, f"the group {key.sql(dialect='spark')} is none of its columns")
    return groups, None


_AFTER_GROUPS = ("distinct", "qualify", "order", "sort", "limit", "offset")


def _columns_of(key: Any, outputs: Sequence[Any]) -> tuple[str, ...]:
    """The columns that hold a group: its expression, or a name for it. (Spark takes a name for an
    input's column first, so an expression of a column of that name is not the group.)"""
    word = key.name.lower() if isinstance(key, exp.Column | exp.Anonymous) else ""
    time_window = word == "window" and isinstance(key, exp.Anonymous)
    same, named = [], []
    for item in outputs:
        node, name = _plain(item), item.alias_or_name
        if not isinstance(node, exp.Column):
            columns = {column.name.lower() for column in node.find_all(exp.Column)}
            if key == node:
                same.append(name)
            elif isinstance(key, exp.Column) and name.lower() == word and word not in columns:
                named.append(name)
        elif time_window:
            if word in (node.name.lower(), node.table.lower()):
                same.append(name)
        elif isinstance(key, exp.Column):
            if word == node.name.lower():
                same.append(name)
            elif word == name.lower():
                named.append(name)
    return tuple(name for name in same or named if name)


def _plain(item: Any) -> Any:
    """A column of a SELECT without its name."""
    return item.this if isinstance(item, exp.Alias) else item


def _of_records(tree: Any) -> bool:
    """Are all metadata columns among the columns?"""
    outputs = list(tree.expressions) if isinstance(tree, exp.Select) else []
    names = {item.alias_or_name for item in outputs}
    return any(item.is_star for item in outputs) or names >= set(METADATA)


def _number(key: Any, outputs: Sequence[Any]) -> bool:
    return str(key.this).isdigit() and 1 <= int(str(key.this)) <= len(outputs)


def _own(item: Any, kind: Any) -> Iterator[Any]:
    """Nodes of an expression, and of no query inside it; an aggregate OVER rows is none."""
    if isinstance(item, exp.Query):
        return
    if isinstance(item, kind):
        yield item
    elif isinstance(item, exp.Window) and kind is exp.AggFunc:
        return
    for child in item.iter_expressions():
        yield from _own(child, kind)


def _tables(tree: Any) -> set[str]:
    return {table.name.lower() for table in tree.find_all(exp.Table) if not table.db}


def _start(tree: Any, tokens: Sequence[Token]) -> int:
    starts = [node.meta["start"] for node in tree.find_all(exp.Expression) if "start" in node.meta]
    return min(starts, default=tokens[0].start)


def _place(tokens: Sequence[Token], kind: TokenType, tree: Any) -> int:
    """Where the last such word before the tree's names stands."""
    words = [token.start for token in tokens if token.token_type is kind]
    begin = _start(tree, tokens)
    before = [at for at in words if at < begin]
    return (before or words or [0])[-1]


# ── without Spark ────────────────────────────────────────────────────────────────────────────────


class _Beyond(Exception):
    """What only Spark can do."""


def _items(tree: Any) -> Iterator[Item | Star]:
    """The columns of a SELECT that has nothing else."""
    if not isinstance(tree, exp.Select):
        raise _Beyond(tree.key.upper())
    for key, words in _CLAUSES.items():
        if tree.args.get(key):
            raise _Beyond(words)
    table: Any = tree.args["from_"].this if tree.args.get("from_") else None
    plain = isinstance(table, exp.Table) and table.name.lower() == STREAM and not table.db
    rest = {key for key, value in tree.args.items() if value} - {"expressions", "from_"}
    if not plain or rest or {k for k, v in table.args.items() if v} - {"this", "alias"}:
        raise _Beyond("more than one table")
    if table.args.get("alias") and table.args["alias"].columns:
        raise _Beyond("names for columns")
    known = {STREAM, table.alias_or_name.lower()}
    aliases: set[str] = set()
    for item in tree.expressions:
        name = item.alias if isinstance(item, exp.Alias) else ""
        made = _item(item.this if name else item, name, known)
        if made is not None:
            of = made.of if isinstance(made, Item) else None
            if isinstance(of, Column) and of.names[0].lower() in aliases:
                raise _Beyond("a column that another one names")
            aliases |= {name.lower()} - {""}
            yield made


def _item(node: Any, name: str, known: set[str]) -> Item | Star | None:
    star = node.this if isinstance(node, exp.Column) and node.is_star else node
    if isinstance(star, exp.Star) and not name:
        if {key for key, value in star.args.items() if value} - {"except_"}:
            raise _Beyond("more than names of columns")
        excluded = star.args.get("except_") or []
        if any(len(_path(column)) != 1 for column in excluded):
            raise _Beyond("EXCEPT of a field inside")
        return Star(tuple(_path(column)[0] for column in excluded))
    if isinstance(node, exp.Column | exp.Dot):
        path = _path(node)
        if len(path) > 1 and path[0].lower() in known:
            path = path[1:]
        if path in [[word] for word in METADATA] and name in ("", path[0]):
            return None
        if path[0] in (*METADATA, "_headers") or (path[0] == KEY and len(path) > 1):
            raise _Beyond(path[0])
        of: Expression = KeyBytes() if path[0] == KEY else Column(tuple(path))
        return Item(of, name or path[-1])
    if isinstance(node, exp.Literal) and node.is_string and name:
        return Item(Literal(str(node.this)), name)
    if isinstance(node, exp.Boolean) and name:
        return Item(Literal(bool(node.this)), name)
    raise _Beyond("more than names of columns")


def _path(node: Any) -> list[str]:
    if isinstance(node, exp.Identifier):
        return [node.name]
    parts = node.parts if isinstance(node, exp.Column | exp.Dot) else ()
    if not parts or not all(isinstance(part, exp.Identifier) for part in parts):
        raise _Beyond("more than names of columns")
    return [part.name for part in parts]
