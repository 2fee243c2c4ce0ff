"""Schemas in the shapes that other libraries write, with values that they take and values that they refuse.

All of it is our own: each schema has the form that the named library gives to a declaration of ours.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AnyUrl, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

DRAFT_7 = "http://json-schema.org/draft-07/schema#"
DRAFT_2020 = "https://json-schema.org/draft/2020-12/schema"
SAFE = 2**53 - 1


@dataclass(frozen=True)
class Foreign:
    """A schema with values whose properties have the schema's order."""

    schema: dict[str, Any]
    taken: list[Any] = field(default_factory=list)
    refused: list[Any] = field(default_factory=list)


def _object(properties: dict[str, Any], *optional: str, **more: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, **({"required": required} if required else {}), **more}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "number"}, {"type": "boolean"}

# ── Zod 3, by zod-to-json-schema ─────────────────────────────────────────────────────────────────

_POINT = {"type": "array", "minItems": 2, "maxItems": 2, "items": [{"type": "number"}, {"type": "string"}]}
ZOD_3 = {
    "object, closed": Foreign(
        _object(
            {
                "title": {"type": "string", "minLength": 1, "maxLength": 8},
                "pages": {"type": "integer", "exclusiveMinimum": 0},
                "tags": {"type": "array", "items": TEXT, "maxItems": 2},
            },
            "tags",
            additionalProperties=False,
            **{"$schema": DRAFT_7},
        ),
        [{"title": "Tide", "pages": 3}, {"title": "Tide", "pages": 3, "tags": ["a", "b"]}],
        [{"title": "", "pages": 3}, {"title": "Tide", "pages": 0}, {"title": "T", "pages": 1, "tags": ["a", "b", "c"]}],
    ),
    "email": Foreign(_object({"to": {"type": "string", "format": "email"}}), [{"to": "a@b.org"}], [{"to": "a.org"}]),
    "positive, for OpenAPI 3.0": Foreign(
        _object({"price": {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}}),
        [{"price": 0.25}],
        [{"price": 0}, {"price": 0.75}],
    ),
    "nullable, for OpenAPI 3.0": Foreign(_object({"note": {"type": "string", "nullable": True}}), [{"note": "x"}]),
    "nullable": Foreign(
        _object({"note": {"type": ["string", "null"]}}), [{"note": None}, {"note": "x"}], [{"note": 1}]
    ),
    "tuple": Foreign(_object({"at": _POINT}), [{"at": [1, "m"]}], [{"at": [1]}, {"at": ["m", 1]}]),
    "record": Foreign(
        _object({"stock": {"type": "object", "additionalProperties": NUMBER}}),
        [{"stock": {"pens": 3}}],
        [{"stock": {"a": "b"}}],
    ),
    "record of a choice": Foreign(
        _object(
            {"hours": {"type": "object", "propertyNames": {"enum": ["mon", "tue"]}, "additionalProperties": NUMBER}}
        ),
        [{"hours": {"mon": 8}}, {"hours": {"mon": 8, "tue": 7.5}}],
        [{"hours": {"sun": 8}}, {"hours": {"mon": "all"}}],
    ),
    "record of an expression": Foreign(
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{2}$"}, "additionalProperties": TEXT},
        [{"de": "Hallo"}, {}],
        [{"deu": "Hallo"}],
    ),
    "union by a literal": Foreign(
        _object(
            {
                "shape": {
                    "anyOf": [
                        _object({"kind": {"type": "string", "const": "disc"}, "r": NUMBER}, additionalProperties=False),
                        _object({"kind": {"type": "string", "const": "box"}, "w": NUMBER}, additionalProperties=False),
                    ]
                }
            }
        ),
        [{"shape": {"kind": "disc", "r": 1}}, {"shape": {"kind": "box", "w": 2}}],
        [{"shape": {"kind": "disc", "w": 1}}, {"shape": {"kind": "cone"}}],
    ),
    "intersection": Foreign(
        {"allOf": [_object({"a": TEXT}), _object({"b": NUMBER})]}, [{"a": "x", "b": 1}], [{"a": "x"}, {"a": 1, "b": 1}]
    ),
    "a part that is used twice": Foreign(
        _object({"home": _object({"city": TEXT}, additionalProperties=False), "work": {"$ref": "#/properties/home"}}),
        [{"home": {"city": "Ulm"}, "work": {"city": "Bonn"}}],
        [{"home": {"city": "Ulm"}, "work": {"city": 1}}],
    ),
    "enum of numbers": Foreign(_object({"n": {"type": "number", "enum": [1, 2, 40]}}), [{"n": 40}], [{"n": 3}]),
    "date": Foreign(
        _object({"at": {"type": "string", "format": "date-time"}}), [{"at": "2026-11-28T10:00:00Z"}], [{"at": "today"}]
    ),
    "expression with a word boundary": Foreign(
        _object({"w": {"type": "string", "pattern": "\\bto\\b"}}), [{"w": "to"}]
    ),
    "expression with a reference": Foreign(_object({"w": {"type": "string", "pattern": "^(a|b)\\1$"}}), [{"w": "aa"}]),
}

# ── Zod 4, by z.toJSONSchema ─────────────────────────────────────────────────────────────────────

_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_LABEL = r"[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?"
_HOST = rf"^(?=.{{1,253}}\.?$){_LABEL}(?:\.{_LABEL})*\.?$"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?"
_DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
_UUID = r"^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12})$"
ZOD_4 = {
    "email": Foreign(
        _object({"to": {"type": "string", "format": "email", "pattern": _EMAIL}}, additionalProperties=False),
        [{"to": "ada.l@mail.example.org"}],
        [{"to": "ada"}, {"to": "ada@mail"}, {"to": ".ada@mail.org"}, {"to": "a..b@mail.org"}],
    ),
    "integer": Foreign(
        _object({"n": {"type": "integer", "minimum": -SAFE, "maximum": SAFE}}),
        [{"n": 0}, {"n": -SAFE}],
        [{"n": SAFE + 1}],
    ),
    "integer of 64 bits": Foreign(
        _object({"n": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}}),
        [{"n": 0}, {"n": -(2**62)}, {"n": 2**62}],
        [{"n": 2**63 + 1024}, {"n": 0.5}],
    ),
    "unsigned integer of 64 bits": Foreign(
        _object({"n": {"type": "integer", "minimum": 0, "maximum": 2**64 - 1}}), [{"n": 7}], [{"n": -1}]
    ),
    "float of 64 bits": Foreign(
        _object({"x": {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}}),
        [{"x": 1.5}, {"x": -1e300}],
        [{"x": "1"}],
    ),
    "float of 32 bits": Foreign(
        _object({"x": {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}}),
        [{"x": 0.1}],
    ),
    "uuid": Foreign(
        _object({"id": {"type": "string", "format": "uuid", "pattern": _UUID}}),
        [{"id": "0b6f2c3e-1d4a-4c55-9e77-2b8a90c1d2e3"}],
        [{"id": "0b6f2c3e-1d4a-0c55-9e77-2b8a90c1d2e3"}, {"id": "7"}],
    ),
    "host": Foreign(
        _object({"host": {"type": "string", "format": "hostname", "pattern": _HOST}}),
        [{"host": "mail.example.org"}],
        [{"host": "-"}],
    ),
    "local time": Foreign(
        _object({"at": {"type": "string", "format": "time", "pattern": f"^{_TIME}$"}}),
        [{"at": "09:30"}],
        [{"at": "24:00"}],
    ),
    "instant": Foreign(
        _object({"at": {"type": "string", "format": "date-time", "pattern": rf"^\d{{4}}-\d\d-\d\dT(?:{_TIME}(?:Z))$"}}),
        [{"at": "2026-11-28T09:30:00Z"}],
        [{"at": "2026-11-28"}],
    ),
    "duration": Foreign(
        _object({"takes": {"type": "string", "format": "duration", "pattern": _DURATION}}),
        [{"takes": "PT20M"}],
        [{"takes": "20"}],
    ),
    "record of a choice": Foreign(
        {
            "$schema": DRAFT_2020,
            "type": "object",
            "propertyNames": {"type": "string", "enum": ["north", "south"]},
            "additionalProperties": {"type": "integer", "minimum": 0},
            "required": ["north", "south"],
        },
        [{"north": 1, "south": 2}],
        [{"north": 1}, {"north": 1, "south": 2, "west": 3}],
    ),
    "partial record": Foreign(
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": FLAG},
        [{}, {"b": True}],
        [{"c": True}],
    ),
    "record of short names": Foreign(
        {"type": "object", "propertyNames": {"type": "string", "maxLength": 3}, "additionalProperties": FLAG},
        [{"abc": True}],
        [{"abcd": True}],
    ),
    "tuple with a rest": Foreign(
        _object({"row": {"type": "array", "prefixItems": [TEXT, NUMBER], "items": FLAG}}),
        [{"row": ["a", 1]}, {"row": ["a", 1, True]}],
        [{"row": [1, 1]}, {"row": ["a", 1, 2]}],
    ),
    "recursive": Foreign(
        _object({"root": {"$ref": "#/$defs/__schema0"}})
        | {
            "$defs": {
                "__schema0": _object(
                    {"name": TEXT, "parts": {"type": "array", "items": {"$ref": "#/$defs/__schema0"}}},
                    additionalProperties=False,
                )
            }
        },
        [{"root": {"name": "a", "parts": [{"name": "b", "parts": []}]}}],
        [{"root": {"name": "a", "parts": [{"name": "b"}]}}],
    ),
    "union by a literal": Foreign(
        {
            "oneOf": [
                _object({"type": {"type": "string", "const": "ok"}, "data": TEXT}, additionalProperties=False),
                _object({"type": {"type": "string", "const": "no"}, "code": NUMBER}, additionalProperties=False),
            ]
        },
        [{"type": "ok", "data": "x"}, {"type": "no", "code": 4}],
        [{"type": "ok", "code": 4}],
    ),
    "password": Foreign(
        _object({"secret": {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)(?!.*\s)[\x21-\x7e]{6,12}$"}}),
        [{"secret": "Harbour7"}],
        [{"secret": "harbour7"}, {"secret": "Harbours"}, {"secret": "Hr7"}],
    ),
    "a name that is not reserved": Foreign(
        _object({"name": {"type": "string", "pattern": "^(?!tmp)[a-z]+$"}}),
        [{"name": "tm"}, {"name": "temp"}],
        [{"name": "tmpx"}],
    ),
    "not empty": Foreign(
        _object({"name": {"type": "string", "pattern": "^(?!$)[a-z ]*$"}}), [{"name": "a"}], [{"name": ""}]
    ),
}

# ── pydantic: of models, by the version that is installed ────────────────────────────────────────


class Colour(enum.Enum):
    """A choice."""

    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    """A cat."""

    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    """A dog."""

    kind: Literal["dog"]
    name: str | None = None


class Keeper(BaseModel):
    """A discriminated union."""

    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Node(BaseModel):
    """A recursive one."""

    value: int
    next: Node | None = None


class Bounds(BaseModel):
    """Bounds of every kind."""

    ratio: float = Field(gt=0, lt=0.001)
    share: float = Field(ge=-1, le=1)
    even: int = Field(multiple_of=2, ge=0)
    code: Annotated[str, StringConstraints(min_length=2, max_length=4, pattern=r"^[A-Z]+$")]


class Times(BaseModel):
    """Times."""

    day: date
    at: datetime
    clock: time
    takes: timedelta
    id: UUID


class Price(BaseModel):
    """A decimal number."""

    price: Decimal = Field(max_digits=5, decimal_places=2)


class Table(BaseModel):
    """Maps of several kinds."""

    by_colour: dict[Colour, int]
    by_name: dict[Annotated[str, StringConstraints(pattern="^[a-z]+$")], int]
    by_word: dict[Literal["low", "high"], float]


class Loose(BaseModel):
    """It takes further fields."""

    model_config = ConfigDict(extra="allow")
    a: int


class Nested(BaseModel):
    """Optional parts of optional parts."""

    tags: list[list[str] | None] | None = None
    pair: tuple[int, str] | None = None
    link: AnyUrl | None = None


PYDANTIC = {
    "choice": Foreign(TypeAdapter(Colour).json_schema(), ["red"], ["green"]),
    "discriminated union": Foreign(
        Keeper.model_json_schema(),
        [{"pet": {"kind": "cat", "lives": 9}}, {"pet": {"kind": "dog", "name": None}}, {"pet": {"kind": "dog"}}],
        [{"pet": {"kind": "cat", "lives": 10}}, {"pet": {"kind": "dog", "lives": 1}}],
    ),
    "recursive": Foreign(
        Node.model_json_schema(),
        [{"value": 1, "next": {"value": 2, "next": None}}],
        [{"value": 1, "next": {"value": "2"}}],
    ),
    "bounds": Foreign(
        Bounds.model_json_schema(),
        [{"ratio": 0.0005, "share": -1, "even": 4, "code": "AB"}],
        [
            {"ratio": 0, "share": 1, "even": 4, "code": "AB"},
            {"ratio": 0.0005, "share": 1.1, "even": 4, "code": "AB"},
            {"ratio": 0.0005, "share": 1, "even": 3, "code": "AB"},
            {"ratio": 0.0005, "share": 1, "even": 4, "code": "ABCDE"},
            {"ratio": 0.0005, "share": 1, "even": 4, "code": "ab"},
        ],
    ),
    "times": Foreign(
        Times.model_json_schema(),
        [
            {
                "day": "2026-11-28",
                "at": "2026-11-28T09:30:00Z",
                "clock": "09:30:00Z",
                "takes": "PT5M",
                "id": "0b6f2c3e-1d4a-4c55-9e77-2b8a90c1d2e3",
            }
        ],
        [{"day": "28 November"}],
    ),
    "decimal": Foreign(Price.model_json_schema(), [{"price": 1.5}, {"price": "1.50"}], [{"price": None}]),
    "maps": Foreign(
        Table.model_json_schema(),
        [{"by_colour": {"red": 1}, "by_name": {"ada": 2}, "by_word": {"low": 0.5, "high": 1}}],
        [
            {"by_colour": {"pink": 1}, "by_name": {}, "by_word": {}},
            {"by_colour": {}, "by_name": {"ada": "2"}, "by_word": {}},
            {"by_colour": {}, "by_name": {}, "by_word": {"mid": 1}},
        ],
    ),
    "further fields": Foreign(Loose.model_json_schema(), [{"a": 1}, {"a": 1, "b": [2]}], [{"b": 2}]),
    "nested optionals": Foreign(
        Nested.model_json_schema(),
        [{}, {"tags": [["a"], None]}, {"tags": None, "pair": [1, "x"], "link": "https://example.org/a"}],
        [{"tags": [1]}, {"pair": [1]}, {"pair": [1, "x", 2]}],
    ),
}

_DIGIT = r"^(?!^[-+.]*$)[+-]?0*"


def _decimal(pattern: str) -> dict[str, Any]:
    return _object({"price": {"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}], "title": "Price"}})


# the forms of pydantic 2.12 and 2.13
PYDANTIC_DECIMALS = {
    "plain": Foreign(
        _decimal(rf"{_DIGIT}\d*\.?\d*$"),
        [{"price": "12.50"}, {"price": "-.5"}, {"price": "7."}, {"price": 1}],
        [{"price": ""}, {"price": "+"}, {"price": "1.2.3"}, {"price": "."}, {"price": "ten"}],
    ),
    "with places": Foreign(
        _decimal(rf"{_DIGIT}\d*\.?\d{{0,2}}0*$"),
        [{"price": "12.50"}, {"price": "1.2500"}],
        [{"price": "."}, {"price": "1.255"}],
    ),
    "with digits": Foreign(
        _decimal(rf"{_DIGIT}(?:\d{{0,4}}|(?=[\d.]{{1,5}}0*$)\d*\.\d*0*$)"),
        [{"price": "1234"}, {"price": "1.234"}, {"price": "0001.5"}],
        [{"price": "12345"}, {"price": "12.345"}, {"price": "x"}],
    ),
    "with both": Foreign(
        _decimal(rf"{_DIGIT}(?:\d{{0,3}}|(?=[\d.]{{1,6}}0*$)\d{{0,3}}\.\d{{0,2}}0*$)"),
        [{"price": "123.45"}, {"price": "123"}, {"price": "0.50"}],
        [{"price": "1234.5"}, {"price": "1.255"}, {"price": "-"}],
    ),
    "of a serialised one": Foreign(
        _object({"price": {"pattern": rf"{_DIGIT}\d*\.?\d*$", "title": "Price", "type": "string"}}),
        [{"price": "3"}],
        [{"price": "-"}],
    ),
}

# ── tools of MCP servers ─────────────────────────────────────────────────────────────────────────

_PATH = {"type": "string", "description": "Path of a file."}
MCP = {
    "filesystem, read": Foreign(
        _object(
            {"path": _PATH, "tail": NUMBER, "head": NUMBER},
            "tail",
            "head",
            additionalProperties=False,
            **{"$schema": DRAFT_7},
        ),
        [{"path": "a.txt"}, {"path": "a.txt", "head": 5}],
        [{"head": 5}, {"path": "a.txt", "lines": 3}],
    ),
    "filesystem, edit": Foreign(
        _object(
            {
                "path": _PATH,
                "edits": {
                    "type": "array",
                    "items": _object({"oldText": TEXT, "newText": TEXT}, additionalProperties=False),
                },
                "dryRun": {"type": "boolean", "default": False, "description": "Only show what would change."},
            },
            "dryRun",
            additionalProperties=False,
        ),
        [{"path": "a", "edits": [{"oldText": "x", "newText": "y"}]}, {"path": "a", "edits": [], "dryRun": True}],
        [{"path": "a", "edits": [{"oldText": "x"}]}],
    ),
    "filesystem, list of roots": Foreign({"type": "object", "properties": {}, "required": []}, [{}], [{"a": 1}]),
    "github, issue": Foreign(
        _object(
            {
                "owner": TEXT,
                "repo": TEXT,
                "title": TEXT,
                "body": TEXT,
                "assignees": {"type": "array", "items": TEXT},
                "milestone": NUMBER,
                "labels": {"type": "array", "items": TEXT},
            },
            *("body", "assignees", "milestone", "labels"),
        ),
        [{"owner": "o", "repo": "r", "title": "t", "labels": ["bug", "bug"]}],
        [{"owner": "o", "repo": "r"}],
    ),
    "github, search": Foreign(
        _object(
            {
                "q": TEXT,
                "order": {"type": "string", "enum": ["asc", "desc"]},
                "page": {"type": "number", "minimum": 1},
                "per_page": {"type": "number", "minimum": 1, "maximum": 100},
            },
            *("order", "page", "per_page"),
        ),
        [{"q": "tide", "order": "asc", "page": 1, "per_page": 100}],
        [{"q": "tide", "order": "up"}, {"q": "tide", "page": 0}, {"q": "tide", "per_page": 101}],
    ),
    "github, review": Foreign(
        _object(
            {
                "event": {"type": "string", "enum": ["APPROVE", "COMMENT"]},
                "comments": {
                    "type": "array",
                    "items": {
                        "anyOf": [
                            _object({"path": TEXT, "position": NUMBER, "body": TEXT}, additionalProperties=False),
                            _object({"path": TEXT, "line": NUMBER, "body": TEXT}, additionalProperties=False),
                        ]
                    },
                },
            },
            "comments",
        ),
        [{"event": "COMMENT", "comments": [{"path": "a", "line": 3, "body": "b"}]}],
        [{"event": "COMMENT", "comments": [{"path": "a", "body": "b"}]}],
    ),
    "slack, message": Foreign(
        _object({"channel_id": TEXT, "thread_ts": {"type": "string", "pattern": r"^\d{10}\.\d{6}$"}, "text": TEXT}),
        [{"channel_id": "C1", "thread_ts": "1712345678.123456", "text": "Hi"}],
        [{"channel_id": "C1", "thread_ts": "now", "text": "Hi"}],
    ),
    "slack, list": Foreign(
        _object(
            {"limit": {"type": "number", "default": 100, "description": "At most 200."}, "cursor": TEXT},
            "limit",
            "cursor",
        ),
        [{}, {"limit": 5}],
        [{"limit": "5"}],
    ),
    "postgres, query": Foreign(
        {"type": "object", "properties": {"sql": TEXT}}, [{"sql": "SELECT 1"}, {}], [{"sql": 1}]
    ),
    "memory, entities": Foreign(
        _object(
            {
                "entities": {
                    "type": "array",
                    "items": _object(
                        {"name": TEXT, "entityType": TEXT, "observations": {"type": "array", "items": TEXT}}
                    ),
                }
            }
        ),
        [{"entities": [{"name": "Ada", "entityType": "person", "observations": []}]}],
        [{"entities": [{"name": "Ada"}]}],
    ),
    "fetch, by pydantic": Foreign(
        _object(
            {
                "url": {"format": "uri", "minLength": 1, "title": "Url", "type": "string"},
                "max_length": {"default": 5000, "exclusiveMaximum": 1000000, "exclusiveMinimum": 0, "type": "integer"},
                "raw": {"default": False, "type": "boolean"},
            },
            *("max_length", "raw"),
            title="Fetch",
        ),
        [{"url": "https://example.org/", "max_length": 100}],
        [{"url": "https://example.org/", "max_length": 0}, {"url": ""}],
    ),
    "a required field that no property describes": Foreign(
        {"type": "object", "properties": {"a": NUMBER}, "required": ["a", "b"]}, [{"a": 1, "b": "x"}], [{"a": 1}]
    ),
    "either of two that no property describes": Foreign(
        {"type": "object", "properties": {"a": NUMBER}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        [{"a": 1}, {"b": 2}],
        [{}],
    ),
    "required, by a property": Foreign(
        {"type": "object", "properties": {"a": {"type": "string", "required": True}, "b": {**TEXT, "required": False}}},
        [{"a": "x"}],
        [{"b": "x"}],
    ),
    "counts as floats": Foreign(
        _object({"a": {"type": "string", "minLength": 1.0, "maxLength": 2.0}}), [{"a": "x"}], [{"a": "xyz"}]
    ),
    "a length without end": Foreign(_object({"a": {"type": "string", "maxLength": 10**12}}), [{"a": "x"}], [{"a": 1}]),
    "names by an expression that none reads": Foreign(
        {"type": "object", "patternProperties": {"^(?!_)": NUMBER}, "additionalProperties": False},
        [{"a": 1}],
        [{"a": "x"}],
    ),
}

# ── keyword by keyword, in the form of JSON Schema's own test suite ──────────────────────────────

KEYWORDS: dict[str, list[Foreign]] = {
    "type": [
        Foreign({"type": "integer"}, [0, -3, 120], [1.5, "1", None, True]),
        Foreign({"type": "number"}, [0, 1.5, -2e3], ["1", None, False]),
        Foreign({"type": "string"}, ["", 'ä "q" \\'], [1, None, []]),
        Foreign({"type": "boolean"}, [True, False], [0, "true", None]),
        Foreign({"type": "null"}, [None], [0, "", False]),
        Foreign({"type": "array"}, [[], [1, "a", None]], [{}, "a"]),
        Foreign({"type": "object"}, [{}, {"a": 1}], [[], "a"]),
        Foreign({"type": ["string", "null"]}, ["a", None], [1, []]),
        Foreign({"type": ["array", "integer"]}, [[1], 4], ["a", 1.5]),
    ],
    "enum": [
        Foreign({"enum": ["a", 1, None, True]}, ["a", 1, None, True], ["b", 2, False]),
        Foreign({"enum": [[1, 2], {"a": "b"}]}, [[1, 2], {"a": "b"}], [[1], {"a": "c"}]),
        Foreign({"type": "string", "enum": ["x", "y"]}, ["x"], ["z"]),
    ],
    "const": [
        Foreign({"const": "a b"}, ["a b"], ["a", 1]),
        Foreign({"const": {"a": [1, None]}}, [{"a": [1, None]}], [{"a": [1]}, {}]),
        Foreign({"const": False}, [False], [True, 0]),
    ],
    "properties": [
        Foreign({"properties": {"a": NUMBER, "b": TEXT}}, [{"a": 1, "b": "x"}, {"b": "x"}, {}], [{"a": "x"}, {"b": 1}]),
        Foreign({"properties": {"a": {"properties": {"b": FLAG}}}}, [{"a": {"b": True}}], [{"a": {"b": 1}}]),
    ],
    "required": [
        Foreign(
            {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["b"]},
            [{"a": 1, "b": 2}, {"b": 2}],
            [{"a": 1}],
        ),
        Foreign({"type": "object", "properties": {}, "required": ["b"]}, [{"b": [1]}], [{}]),
        Foreign({"type": "object", "required": ["a b"]}, [{"a b": 1}], [{}]),
    ],
    "additionalProperties": [
        Foreign({"type": "object", "properties": {"a": {}}, "additionalProperties": False}, [{}, {"a": 1}], [{"b": 1}]),
        Foreign({"type": "object", "additionalProperties": FLAG}, [{"x": True}], [{"x": 1}]),
        Foreign(
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": NUMBER},
            [{"a": "x", "b": 1}],
            [{"a": "x", "b": "y"}],
        ),
    ],
    "patternProperties": [
        Foreign(
            {"type": "object", "patternProperties": {"^n_": NUMBER, "^t_": TEXT}, "additionalProperties": False},
            [{"n_a": 1, "t_a": "x"}, {}],
            [{"n_a": "x"}, {"q": 1}],
        ),
    ],
    "propertyNames": [
        Foreign(
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}}, [{}, {"a": 1}, {"a": 1, "b": "x"}], [{"c": 1}]
        ),
        Foreign({"type": "object", "propertyNames": {"const": "a"}}, [{"a": 1}], [{"b": 1}]),
        Foreign({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, [{"q": None}], [{"Q": None}, {"qq": 1}]),
        Foreign(
            {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]
        ),
    ],
    "minProperties, maxProperties": [
        Foreign(
            {"type": "object", "minProperties": 1, "maxProperties": 2},
            [{"a": 1}, {"a": 1, "b": 2}],
            [{}, {"a": 1, "b": 2, "c": 3}],
        ),
    ],
    "items": [
        Foreign({"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]]),
        Foreign({"items": {"items": FLAG}}, [[[True], []]], [[[1]]]),
    ],
    "prefixItems": [
        Foreign(
            {"type": "array", "prefixItems": [TEXT, NUMBER], "items": False, "minItems": 2},
            [["a", 1]],
            [["a"], [1, "a"], ["a", 1, 2]],
        ),
    ],
    "minItems, maxItems": [
        Foreign({"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 3}, [[1], [1, 1, 1]], [[], [1, 1, 1, 1]]),
    ],
    "minLength, maxLength": [
        Foreign({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "äöü", "日本"], ["a", "abcd"]),
    ],
    "pattern": [
        Foreign({"type": "string", "pattern": "^a+b?$"}, ["a", "aab"], ["b", "ba"]),
        Foreign({"type": "string", "pattern": "b"}, ["abc", "b"], ["ac"]),
        Foreign({"type": "string", "pattern": r"^\d{2}/\w$"}, ["12/a"], ["1/a", "12/-"]),
        Foreign({"type": "string", "pattern": r"^(?=.*x)(?!.*yy)[a-z]*$"}, ["ax", "xyzy"], ["a", "xyy"]),
        Foreign({"type": "string", "pattern": r"^(?!ab)[a-z]+$"}, ["a", "ba", "ac"], ["ab", "abc"]),
        Foreign({"type": "string", "pattern": "^a$", "maxLength": 5}, ["a"], ["aa"]),
    ],
    "format": [
        Foreign({"type": "string", "format": "date"}, ["2026-02-28"], ["2026-13-01", "x"]),
        Foreign({"type": "string", "format": "date-time"}, ["2026-02-28T01:02:03Z"], ["2026-02-28"]),
        Foreign({"type": "string", "format": "time"}, ["01:02:03Z"], ["25:00:00Z"]),
        Foreign({"type": "string", "format": "duration"}, ["P1D", "PT1H"], ["1 day"]),
        Foreign({"type": "string", "format": "email"}, ["a.b@c.de"], ["a.b"]),
        Foreign({"type": "string", "format": "hostname"}, ["a-b.example"], ["a b"]),
        Foreign({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["127.0.0.256"]),
        Foreign({"type": "string", "format": "ipv6"}, ["::1"], ["1"]),
        Foreign({"type": "string", "format": "uuid"}, ["0b6f2c3e-1d4a-4c55-9e77-2b8a90c1d2e3"], ["0b6f"]),
        Foreign({"type": "string", "format": "uri"}, ["https://a.example/b?c#d"], ["a b"]),
    ],
    "minimum, maximum": [
        Foreign({"type": "integer", "minimum": -2, "maximum": 12}, [-2, 0, 12], [-3, 13]),
        Foreign({"type": "number", "minimum": 0.5, "maximum": 1.25}, [0.5, 0.75, 1.25], [0.4, 1.3, 0, 2]),
        Foreign({"type": "number", "maximum": -1}, [-1, -1.5, -20], [-0.5, 0, 1]),
    ],
    "exclusiveMinimum, exclusiveMaximum": [
        Foreign({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, [1, 2], [0, 3]),
        Foreign({"type": "number", "exclusiveMinimum": 0, "maximum": 0.3}, [0.1, 0.3], [0, 0.31]),
        Foreign({"type": "number", "exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, [1.25], [1, 1.5]),
        Foreign({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, [-1.5, -1.25], [-1, -2]),
        Foreign({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, [-0.5, -0.25], [0, 0.25]),
        Foreign({"allOf": [{"type": "number", "exclusiveMinimum": 2}, {"maximum": 2.5}]}, [2.25, 2.5], [2, 3]),
        Foreign({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1e-12}, [], [0, 1]),
    ],
    "multipleOf": [
        Foreign({"type": "integer", "multipleOf": 5}, [0, 10, -15], [3, 12]),
        Foreign({"type": "number", "multipleOf": 0.25}, [0.25, 1.25], [0.3]),
    ],
    "anyOf": [
        Foreign({"anyOf": [NUMBER, {"type": "string", "maxLength": 1}]}, [1.5, "a"], ["ab", None]),
        Foreign(
            {"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
            [{"a": 1}],
            [{}],
        ),
    ],
    "allOf": [
        Foreign({"allOf": [{"type": "integer"}, {"minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5, 2.5]),
    ],
    "$ref": [
        Foreign({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, [1], ["1"]),
        Foreign({"definitions": {"a b": TEXT}, "items": {"$ref": "#/definitions/a%20b"}}, [["x"]], [[1]]),
        Foreign(
            {"properties": {"a": {"$ref": "#"}}, "additionalProperties": False}, [{"a": {"a": {}}}], [{"a": {"b": {}}}]
        ),
    ],
    "true, false": [
        Foreign({"properties": {"a": True, "b": False}, "type": "object"}, [{"a": [1]}, {}], [{"b": 1}]),
    ],
}

FOREIGN: dict[str, dict[str, Foreign]] = {
    "Zod 3": ZOD_3,
    "Zod 4": ZOD_4,
    "pydantic": PYDANTIC,
    "pydantic's decimals": PYDANTIC_DECIMALS,
    "MCP": MCP,
}
