"""Connections: their options ↔ the properties of librdkafka, the registry's client and Iceberg.

In: the options of CREATE CONNECTION. Out: a section of the config. Words stand for a property's
name, joined by dots for Kafka, and by dashes for a catalog: SECURITY PROTOCOL is
`security.protocol`, IO IMPL is `io-impl`; any other property is named in quotes. What a user and a
password, an AWS connection and a catalog's TYPE mean to Iceberg is said here, once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from frazil.config.checks import CATALOG_NEEDS
from frazil.config.messages import nearest
from frazil.config.settings import REFERENCE, SECRET, is_reference
from frazil.errors import SqlError
from frazil.sql.options import RawOption, unknown
from frazil.sql.statements import Connection, Option, SecretName, Word

#: Type of connection → the words of its CREATE statement, and between words of a property.
TYPES = {
    "kafka": ("KAFKA", "."),
    "registry": ("CONFLUENT SCHEMA REGISTRY", "."),
    "catalog": ("ICEBERG CATALOG", "-"),
    "aws": ("AWS", "-"),
}
#: Words of their own for a property.
_ALIASES = {
    "kafka": {"broker": "bootstrap.servers", "brokers": "bootstrap.servers"},
    "registry": {},
    "catalog": {"catalog-type": "type", "url": "uri"},
    "aws": {},
}
#: Options that people use, to find the one that is meant.
_KNOWN = {
    "kafka": "BROKER, BROKERS, SECURITY PROTOCOL, SASL MECHANISM, SASL MECHANISMS, SASL USERNAME, "
    "SASL PASSWORD, SSL CA LOCATION, SSL CERTIFICATE LOCATION, SSL KEY LOCATION, SSL KEY PASSWORD, "
    "CLIENT ID",
    "registry": "URL, USER, PASSWORD, SSL CA LOCATION, SSL CERTIFICATE LOCATION, SSL KEY LOCATION",
    "catalog": "TYPE, URI, WAREHOUSE, USER, PASSWORD, CREDENTIAL, TOKEN, SCOPE, AWS CONNECTION, "
    "IO IMPL, CATALOG IMPL, NAME",
    "aws": "ACCESS KEY ID, SECRET ACCESS KEY, SESSION TOKEN, REGION, ENDPOINT, ASSUME ROLE ARN, "
    "ASSUME ROLE SESSION NAME, ASSUME ROLE EXTERNAL ID",
}
#: The types of a catalog in Iceberg's own words, and Amazon's S3 Tables.
CATALOGS = ("rest", "s3table", "glue", "jdbc", "hadoop", "hive", "nessie")
#: AWS options → Iceberg's properties, for the store and Glue.
_AWS = {
    "access-key-id": "s3.access-key-id",
    "secret-access-key": "s3.secret-access-key",
    "session-token": "s3.session-token",
    "region": "client.region",
    "endpoint": "s3.endpoint",
    "assume-role-arn": "client.assume-role.arn",
    "assume-role-session-name": "client.assume-role.session-name",
    "assume-role-external-id": "client.assume-role.external-id",
}
#: A name and a password as one property: `NAME:env:PASSWORD`.
PAIRS = {"registry": "basic.auth.user.info", "rest": "credential"}
_USER_INFO = re.compile(
    r"://[^/\s@]*:[^/\s@]*@|:[^/\s:@]+/[^/\s:@]+@"  # jdbc:oracle:thin:USER/PASSWORD@host
    r"|[?&; ](password|passwd|pwd|api_?key|access_?key|token|secret|sig)\s*=",
    re.IGNORECASE,
)


def known_options(kind: str) -> list[str]:
    return _KNOWN[kind].split(", ")


def connection_options(kind: str, options: Iterable[RawOption]) -> dict[str, Option]:
    """The options of a statement, by property, or by their own words where they stand for more."""
    made: dict[str, Option] = {}
    for option in options:
        name = property_name(kind, option)
        if name in made:
            raise option.error(f"{option.shown} is given twice")
        made[name] = Option(_checked(kind, name, option), option.value_location)
    return made


def property_name(kind: str, option: RawOption) -> str:
    if option.words and option.key:
        raise option.error("expected words, or one key in quotes")
    if option.key:
        return option.key
    name = TYPES[kind][1].join(option.words).lower().replace("_", TYPES[kind][1])
    name = _ALIASES[kind].get(name, name)
    words = " ".join(option.words).upper().replace("_", " ")
    known = known_options(kind)
    secret = SECRET.search(name) and option.value is None
    if kind == "aws" and name not in _AWS:  # a property of Iceberg stands in quotes
        raise unknown(option, "" if secret else nearest(words, known))
    near = difflib.get_close_matches(words, known, n=1, cutoff=0.85)
    if near and near[0] != words and not secret and words not in known:
        raise option.error(
            f"unknown option {words}; did you mean {near[0]}?",
            hint=f"if it is meant, write it in quotes: '{name}'",
        )
    return name


def property_words(kind: str, name: str) -> str:
    """A property as SQL says it: in words where they are read back as this property."""
    separator = TYPES[kind][1]
    if name == "bootstrap.servers":
        return "BROKER"
    words = name.replace(separator, " ").upper()
    plain = all(re.fullmatch(r"[a-z]+[a-z0-9]*", word) for word in name.split(separator))
    known = known_options(kind)
    near = difflib.get_close_matches(words, known, n=1, cutoff=0.85)
    plain = plain and (words in known or (kind != "aws" and not near))
    if plain and name not in _ALIASES[kind]:
        return words
    return "'" + name.replace("'", "''") + "'"


def _checked(kind: str, name: str, option: RawOption) -> Any:
    value = option.value
    if value is None:
        raise option.error(f"{option.shown} has no value")
    if (kind, name) == ("catalog", "aws-connection"):
        if not isinstance(value, Word):
            raise option.error("expected the name of an AWS connection, without single quotes")
        return value
    if isinstance(value, Word):
        shown = "" if SECRET.search(name) else f", found {value.text[:40]}"
        raise option.value_location.source.error(
            option.value_location.at, f"expected a value in single quotes{shown}"
        )
    if isinstance(value, (list, dict)):
        raise option.error(f"{option.shown} takes one text or number")
    named = isinstance(value, SecretName) or is_reference(name, str(value))
    if SECRET.search(name) and not named:
        raise option.error(
            f"a secret is written in the statement as the value of {option.shown}; "
            "expected SECRET and its name",
            hint="CREATE SECRET name AS 'env:NAME', or 'file:PATH'",
        )
    if isinstance(value, str) and _USER_INFO.search(value):
        raise option.error(
            f"a password is written in the value of {option.shown}",
            hint="give it as PASSWORD SECRET name",
        )
    if (kind, name) == ("catalog", "type"):
        return _catalog_type(option, value)
    return value


def _catalog_type(option: RawOption, value: Any) -> Any:
    kind = str(value).lower()
    kind = "s3table" if kind in ("s3tables", "s3tablesrest") else kind
    if kind not in CATALOGS and kind not in ("dynamodb", "bigquery"):
        raise option.error(f"unknown catalog type {value!r}{nearest(kind, CATALOGS)}")
    return kind


def properties(connection: Connection, resolve: Callable[[str, Option], str]) -> dict[str, str]:
    """The section of the config: `[kafka]`, `[decode.registry]` or `[catalog]`; `resolve`: property
    and option → text, with the reference of a secret."""
    given = {
        name: resolve(name, option)
        for name, option in connection.options.items()
        if not isinstance(option.value, Word)
    }
    if connection.type == "registry":
        return _with_user(connection, given, "registry")
    if connection.type == "catalog":
        return _catalog(connection, given)
    return given


_NEEDED = {"kafka": ("bootstrap.servers",), "registry": ("url",)}


def check_complete(connection: Connection) -> None:
    """Refuses a connection that nothing could open."""
    given = {name: str(option.value) for name, option in connection.options.items()}
    kind = given.get("type", "")
    needed: tuple[str, ...] = _NEEDED.get(connection.type, ())
    if connection.type == "catalog" and kind != "s3table":
        needed = CATALOG_NEEDS.get(kind, () if "catalog-impl" in given else ("type",))
    for name in needed:
        if not given.get(name):
            at = connection.options["type"].location if "type" in given else connection.location
            words = "BROKER" if name == "bootstrap.servers" else name.upper()
            assert at
            raise at.source.error(
                at.at,
                f"the connection {connection.name} cannot be opened; expected {words} = '…'",
            )


def _catalog(connection: Connection, given: dict[str, str]) -> dict[str, str]:
    kind = given.get("type", "")
    if kind == "s3table":
        made = {
            "type": "rest",
            "rest.sigv4-enabled": "true",
            "rest.signing-name": "s3tables",
            "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
            "rest-metrics-reporting-enabled": "false",
        }
        return {**made, **{key: value for key, value in given.items() if key != "type"}}
    return _with_user(connection, given, kind)


def _with_user(connection: Connection, given: dict[str, str], kind: str) -> dict[str, str]:
    user, password = given.pop("user", ""), given.pop("password", "")
    if not user and not password:
        return given
    if kind in PAIRS:
        if not user or REFERENCE.match(user) or ":" in user:
            raise _refusal(
                connection,
                "user" if user else "password",
                "USER is a plain text without a colon, beside PASSWORD",
                f"or write both as one secret, NAME:PASSWORD: {_pair_words(kind)} SECRET name",
            )
        if not password:
            raise _refusal(connection, "user", "USER is given without PASSWORD", "")
        return {**given, PAIRS[kind]: f"{user}:{password}"}
    names = {
        "jdbc": ("jdbc.user", "jdbc.password"),
    }.get(kind)
    if names is None:
        raise _refusal(
            connection,
            "user" if user else "password",
            f"a catalog of type {kind or 'without TYPE'} has no user and password in Iceberg",
            "name Iceberg's own properties in quotes",
        )
    return given | {key: value for key, value in zip(names, (user, password), strict=True) if value}


def _pair_words(kind: str) -> str:
    return "BASIC AUTH USER INFO" if kind == "registry" else "CREDENTIAL"


def _refusal(connection: Connection, name: str, fact: str, hint: str) -> SqlError:
    location = connection.options[name].location or connection.location
    assert location is not None
    return location.source.error(location.at, fact, hint=hint)


def aws_properties(
    aws: Connection, catalog: Mapping[str, str], resolve: Callable[[str, Option], str]
) -> dict[str, str]:
    """What an AWS connection adds to the properties of a catalog."""
    given = {_AWS.get(name, name): option for name, option in aws.options.items()}
    made = {name: resolve(name, option) for name, option in given.items()}
    if made and catalog.get("type") != "glue":
        made.setdefault("io-impl", "org.apache.iceberg.aws.s3.S3FileIO")
    role = "client.assume-role.arn" in made
    if role:
        if "client.region" not in made:
            raise _refusal(aws, "assume-role-arn", "ASSUME ROLE ARN is given without REGION", "")
        made["client.factory"] = "org.apache.iceberg.aws.AssumeRoleAwsClientFactory"
        made["client.assume-role.region"] = made["client.region"]
    if catalog.get("rest.sigv4-enabled") == "true":
        if role and "client.credentials-provider" not in catalog:
            raise _refusal(
                aws,
                "assume-role-arn",
                "Iceberg signs requests to a REST catalog with keys or with the machine's own "
                "credentials, and takes on no role for it",
                "leave ASSUME ROLE ARN out, and let a profile or the machine have the role",
            )
        for name in ("access-key-id", "secret-access-key", "session-token"):
            if name in aws.options:
                made[f"rest.{name}"] = made[f"s3.{name}"]
        if "client.region" in made:
            made["rest.signing-region"] = made["client.region"]
    return {**made, **catalog}
