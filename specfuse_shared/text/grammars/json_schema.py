"""JSON schemas as the grammar library takes them: closed objects, one style of writing, and nothing that it misreads.

Libraries that write schemas (Zod, pydantic, OpenAPI generators) use expressions and bounds that llguidance cannot
read, and it misreads some that it can. What can be said in another way is rewritten. The rest is an error that names
the field, if the schema is strict; else the keyword is left out, with a line in the log.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

from specfuse_shared.errors import GrammarError
from specfuse_shared.text.grammars.bounds import check_schema, target_of
from specfuse_shared.text.grammars.guidance import check_beginning, on_deep_stack, problem_of, validated
from specfuse_shared.text.grammars.patterns import readable_patterns
from specfuse_shared.validation import parsed_json

logger = logging.getLogger(__name__)

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write a value, so that members agree on all but its content and none wanders off in white space."""

Path = tuple[str, ...]
"""Keys from the root of a schema to one of its parts."""

_SCHEMA_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf")
_SCHEMA_LISTS = (*_ALTERNATIVES, "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalItems", "additionalProperties")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_OF_NUMBERS = ("multipleOf", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")

LARGEST_NUMBER = 2**63 - 1024
"""The largest bound that the library holds as an integer and as a float; int64's own are 1,023 away."""
LARGEST_COUNT = 2**32 - 1
"""The library's largest length; no answer is longer."""
_NEAREST = 9
"""Decimal places between an excluded bound and the first number that is taken."""
_SECONDS_OF_SEARCH = 0.5
"""Of the processor, to find the part of a schema that cannot be used."""
_WIDE, _MOST_WIDE = 200, 8
"""Maximum number of alternatives and properties that are tried per position, and of positions."""


def styled(schema: Mapping[str, Any] | str, strict: bool) -> dict[str, Any]:
    """The schema as the library takes it: objects closed, values written in one way.

    Raises `GrammarError`, with the `field` where that is known, for a schema that cannot be used.
    """
    try:
        parsed = parsed_json(schema) if isinstance(schema, str) else schema
    except ValueError as error:
        raise GrammarError(f"the schema is no JSON: {error}") from error
    if not isinstance(parsed, Mapping):
        raise GrammarError(f"a JSON schema is an object, not {type(parsed).__name__}")
    return dict(json.loads(_styled(written(parsed), strict)))


def written(schema: Mapping[str, Any]) -> str:
    """The schema as JSON. Raises `GrammarError` if it is too large, or holds what JSON cannot."""
    check_schema(schema)
    try:
        return json.dumps(schema, ensure_ascii=False)
    except TypeError as error:
        raise GrammarError(f"the schema cannot be written as JSON: {error}") from error


@lru_cache(maxsize=64)
def _styled(source: str, strict: bool) -> str:
    """Cached, since every request of an agent has the same tools; so what is left out is logged once."""
    parsed = _with_required_of_parts(json.loads(source))
    closed = dict(parsed) if _has_shared_parts(parsed) else _closed(parsed)
    style = {"x-guidance": {**JSON_STYLE, "lenient": not strict, "coerce_one_of": not strict}}
    reader = _Reader(closed, strict)
    schema = {**reader.rewritten(), **style}
    if problem_of(_compilable(schema)):
        schema = {**reader.without_unreadable(), **style}
        if problem := problem_of(_compilable(schema)):
            raise _named(*_culprit(schema, problem))
    _check_width(schema)
    if reader.dropped:  # logs contain no client data, including field names
        keywords = ", ".join(sorted(set(reader.dropped.values())))
        logger.warning("no grammar holds %s of a schema: left out (strict=True is an error that says where)", keywords)
    return json.dumps(schema, ensure_ascii=False)


def _compilable(schema: Mapping[str, Any]) -> str:
    return json.dumps({"grammars": [{"json_schema": schema}]}, ensure_ascii=False)


# ── objects ──────────────────────────────────────────────────────────────────────────────────────


def _closed(schema: Any, is_part: bool = False) -> Any:
    """Objects that name their properties have no others, but for those that they require.

    Not where several schemas describe one object, since they would exclude each other: `is_part` of one.
    """
    if not isinstance(schema, Mapping):
        return schema
    closed, has_parts = dict(schema), is_part or _names_properties_twice(schema)
    for key in _SCHEMA_MAPS:
        if isinstance(closed.get(key), Mapping):
            closed[key] = {name: _closed(part) for name, part in closed[key].items()}
    for key in _SCHEMA_LISTS:
        if isinstance(closed.get(key), list):
            closed[key] = [_closed(part, has_parts and key in _ALTERNATIVES) for part in closed[key]]
    for key in ("items", "additionalProperties"):
        if key in closed:
            closed[key] = _closed(closed[key])
    if isinstance(closed.get("properties"), Mapping) and not has_parts and not any(key in closed for key in _OPEN):
        undescribed = [name for name in _required_by(closed) if name not in closed["properties"]]
        closed["properties"] = {**closed["properties"], **{name: {} for name in undescribed}}
        closed["additionalProperties"] = False
    return closed


def _required_by(schema: Mapping[str, Any]) -> Iterator[str]:
    """The properties that an object or one of its alternatives requires."""
    for part in (schema, *_alternatives(schema)):
        required = part.get("required")
        yield from (name for name in required if isinstance(name, str)) if isinstance(required, list) else ()


def _alternatives(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    alternatives = [schema[key] for key in _ALTERNATIVES if isinstance(schema.get(key), list)]
    return [part for parts in alternatives for part in parts if isinstance(part, Mapping)]


def _names_properties_twice(schema: Mapping[str, Any]) -> bool:
    """Whether its alternatives name further properties of the same object."""
    return "properties" in schema and any("properties" in part for part in _alternatives(schema))


def _has_shared_parts(schema: Any) -> bool:
    """Whether somewhere a schema that is named elsewhere describes a part of an object: it is closed nowhere then."""
    if isinstance(schema, list):
        return any(map(_has_shared_parts, schema))
    if not isinstance(schema, Mapping):
        return False
    here = [schema, *_alternatives(schema)]
    referring = "properties" in schema and any("$ref" in part for part in here)
    return "allOf" in schema or referring or any(map(_has_shared_parts, schema.values()))


def _with_required_of_parts(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """`required: true` within a property, as drafts before the fourth wrote it, in the list of its object."""

    def moved(node: dict[str, Any], _: Path) -> dict[str, Any]:
        parts = node.get("properties")
        if not isinstance(parts, Mapping):
            return node
        marked = {n: part["required"] for n, part in parts.items() if isinstance(part, Mapping) and "required" in part}
        marked = {name: required for name, required in marked.items() if isinstance(required, bool)}
        if not marked:
            return node
        plain = {n: {k: v for k, v in p.items() if k != "required"} if n in marked else p for n, p in parts.items()}
        listed = node["required"] if isinstance(node.get("required"), list) else []
        return {**node, "properties": plain, "required": [*listed, *(n for n in marked if marked[n])]}

    return dict(_mapped(schema, moved))


# ── a schema that the library reads ──────────────────────────────────────────────────────────────


class _Reader:
    """Rewrites one schema. `dropped`: the places of the keywords that were left out, and the keywords."""

    def __init__(self, schema: Mapping[str, Any], strict: bool) -> None:
        self._schema = schema
        self._strict = strict
        self._is_combined = _combines_numbers(schema)
        self._stops_at = 0.0
        self.dropped: dict[Path, str] = {}

    def rewritten(self) -> dict[str, Any]:
        """The schema with the same values, said as the library reads it."""
        return dict(_mapped(self._schema, self._rewritten))

    def without_unreadable(self) -> dict[str, Any]:
        """The same without the keywords that cannot be read. Raises `GrammarError` that names one, if strict."""

        def work() -> dict[str, Any]:
            self._stops_at = time.thread_time() + _SECONDS_OF_SEARCH
            return dict(_mapped(_mapped(self._schema, self._readable), self._rewritten))

        return on_deep_stack(work)

    def _rewritten(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        node = self._with_names(_with_whole_counts(node), path)
        node = _with_excluded_bounds(self._with_bounds(node, path), always=self._is_combined)
        return _with_readable_patterns(node)

    def _drop(self, node: dict[str, Any], keys: Sequence[str], path: Path, problem: str) -> dict[str, Any]:
        """The schema without these keywords. Raises `GrammarError` if strict."""
        if self._strict:
            raise _named(problem, (*path, keys[0]))
        within = path[-1] if path and path[-1] == "patternProperties" else None
        self.dropped.update({(*path, key): within or key for key in keys if key in node})
        return {key: value for key, value in node.items() if key not in keys}

    # numbers

    def _with_bounds(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        """Bounds as numbers that the library can hold. One of integers gets tighter by as much as int64 has more.

        A bound of floats beyond that says little: it is left out, or tightened if strict.
        """
        node = _with_numeric_exclusions(node)
        kinds = node["type"] if isinstance(node.get("type"), list) else [node.get("type")]
        is_integer = "integer" in kinds and "number" not in kinds
        for key in _OF_NUMBERS[1:]:
            bound = _number_of(node, key)
            if bound is None or abs(bound) < LARGEST_NUMBER:
                continue
            is_upper = key.endswith("aximum")
            if is_upper != (bound > 0):  # all that it leaves is beyond
                node = self._drop(node, [key], path, f"{bound} is beyond what a grammar can count to")
            elif is_integer or self._strict:
                node = {**node, key: LARGEST_NUMBER if is_upper else -LARGEST_NUMBER}
            else:
                node = {name: value for name, value in node.items() if name != key}
        return node

    # names of properties

    def _with_names(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        """`propertyNames` as properties or patterns, where it is a choice, an expression or a length."""
        names = node.get("propertyNames")
        for _ in range(8):  # a class of choices is a reference
            if isinstance(names, Mapping) and isinstance(names.get("$ref"), str):
                names = target_of(names["$ref"], self._schema)
        if not isinstance(names, Mapping) or "patternProperties" in node:
            return node
        rest = {key: value for key, value in node.items() if key != "propertyNames"}
        allowed = [names["const"]] if "const" in names else names.get("enum")
        additional = node.get("additionalProperties", {})
        if isinstance(allowed, list):
            named = node["properties"] if isinstance(node.get("properties"), Mapping) else {}
            properties = {name: named.get(name, additional) for name in allowed if isinstance(name, str)}
            return {**rest, "properties": properties, "additionalProperties": False}
        if (pattern := _pattern_of_names(names)) is not None and additional is not False:
            return {**rest, "patternProperties": {pattern: additional}, "additionalProperties": False}
        limits = set(names) - {"type", "title", "description"}
        if not limits or additional is False:
            return rest
        return node if self._strict else self._drop(node, ["propertyNames"], path, "")

    # what cannot be read

    def _readable(self, node: dict[str, Any], path: Path) -> dict[str, Any]:
        """One schema without the keywords for which it cannot be used by itself."""
        for kind, keys in (("string", _OF_STRINGS), ("number", _OF_NUMBERS)):
            keywords = {key: node[key] for key in keys if key in node}
            problem = self._problem({"type": kind, **keywords}, path) if keywords else None
            if problem is not None and (keyword := self._at_fault(keywords, kind, path, problem)):
                node = self._drop(node, [keyword], path, problem)
        patterns = node.get("patternProperties")
        if isinstance(patterns, Mapping):
            node = self._with_readable_keys(node, patterns, path)
        return node

    def _at_fault(self, keywords: Mapping[str, Any], kind: str, path: Path, problem: str) -> str | None:
        """The keyword without which the others can be used. What contradicts itself is an error, but for a format."""
        for keyword in keywords:
            rest = {key: value for key, value in keywords.items() if key != keyword}
            if "Unsatisfiable" in problem and keyword != "format":
                continue
            if self._problem({"type": kind, **rest}, path) is None:
                return keyword
        return None

    def _with_readable_keys(self, node: dict[str, Any], patterns: Mapping[str, Any], path: Path) -> dict[str, Any]:
        """Properties whose names an unreadable expression describes may have any name."""
        readable: dict[str, Any] = {}
        gone: list[Any] = []
        for pattern, part in patterns.items():
            problem = self._problem(
                {"type": "object", "patternProperties": {key: {} for key in [*readable, pattern]}}, path
            )
            if problem is None:
                readable[pattern] = part
                continue
            self._drop({pattern: part}, [pattern], (*path, "patternProperties"), problem)
            gone.append(part)
        if not gone:
            return node
        additional = node.get("additionalProperties", {})
        either = [*gone, *([] if additional is False else [additional])]
        return {**node, "patternProperties": readable, "additionalProperties": {"anyOf": either}}

    def _problem(self, part: Mapping[str, Any], path: Path) -> str | None:
        if time.thread_time() >= self._stops_at:
            return None
        return validated(
            _compilable({**self._rewritten(dict(part), path), "x-guidance": {"lenient": not self._strict}})
        )


def _mapped(schema: Any, change: Callable[[dict[str, Any], Path], dict[str, Any]], path: Path = ()) -> Any:
    """The schema with a change of every schema in it, the inner ones first."""
    if not isinstance(schema, Mapping):
        return schema
    node = dict(schema)
    for key in {at[0] for at, _ in _parts(schema)}:
        node[key] = schema[key].copy()
    for at, part in _parts(schema):
        new = _mapped(part, change, (*path, *at))
        if len(at) == 1:
            node[at[0]] = new
        else:
            place: Any = int(at[1]) if isinstance(node[at[0]], list) else at[1]
            node[at[0]][place] = new
    return change(node, path)


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The schemas inside of a schema, each with its place."""
    for key in _SCHEMA_MAPS:
        if isinstance(schema.get(key), Mapping):
            yield from (((key, name), part) for name, part in schema[key].items())
    for key in (*_SCHEMA_LISTS, "allOf", "items"):
        if isinstance(schema.get(key), list):
            yield from (((key, str(number)), part) for number, part in enumerate(schema[key]))
    for key in _SINGLE_SCHEMAS:
        if isinstance(schema.get(key), Mapping):
            yield (key,), schema[key]


def _with_whole_counts(node: dict[str, Any]) -> dict[str, Any]:
    """Counts as integers (JSON has one kind of number), without those that nothing can exceed."""
    for key in _COUNTS:
        count = _number_of(node, key)
        if isinstance(count, float) and count.is_integer():
            node = {**node, key: int(count)}
        if key.startswith("max") and count is not None and count > LARGEST_COUNT:
            node = {name: value for name, value in node.items() if name != key}
    return node


def _with_numeric_exclusions(node: dict[str, Any]) -> dict[str, Any]:
    """`exclusiveMinimum: true` with a `minimum`, as in draft 4, as a number."""
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(node.get(exclusive), bool):
            bound = node.get(inclusive)
            gone = (exclusive, inclusive) if node[exclusive] else (exclusive,)
            moved = {exclusive: bound} if node[exclusive] and bound is not None else {}
            node = {**{key: value for key, value in node.items() if key not in gone}, **moved}
    return node


def _combines_numbers(schema: Any) -> bool:
    """Whether several schemas may contain bounds of one number."""
    if isinstance(schema, list):
        return any(map(_combines_numbers, schema))
    if not isinstance(schema, Mapping):
        return False
    joins = any(key in schema for key in ("$ref", *_ALTERNATIVES)) and any(key in schema for key in _OF_NUMBERS)
    return "allOf" in schema or joins or any(map(_combines_numbers, schema.values()))


def _with_excluded_bounds(node: dict[str, Any], always: bool) -> dict[str, Any]:
    """An excluded integer as the bound of the next number, if the library would let it through.

    That applies if the other bound is less than 1 away; `always`: another schema may contain it.
    """
    for exclusive, inclusive, sign in (("exclusiveMinimum", "minimum", 1), ("exclusiveMaximum", "maximum", -1)):
        bound, included = _number_of(node, exclusive), _number_of(node, inclusive)
        if bound is None or abs(bound) >= LARGEST_NUMBER or bound != int(bound):
            continue
        limit_keys = ("maximum", "exclusiveMaximum") if sign > 0 else ("minimum", "exclusiveMinimum")
        others_set = [limit for key in limit_keys if (limit := _number_of(node, key)) is not None]
        room = min((sign * (limit - bound) for limit in others_set), default=math.inf)
        if room <= 0 or (room >= 1 and not always):
            continue
        node = {key: value for key, value in node.items() if key != exclusive}
        if included is None or sign * (included - bound) <= 0:
            node[inclusive] = _next_to(bound, sign, room)
    return node


def _next_to(bound: float, sign: int, distance: float) -> float:
    """A number close to a bound, less than `distance` away."""
    for places in range(_NEAREST, 300):
        neighbour = float(Decimal(bound) + sign * Decimal(10) ** -places)
        if neighbour != bound and Decimal(10) ** -places < distance:
            return neighbour
    return math.nextafter(bound, sign * math.inf)


def _with_readable_patterns(node: dict[str, Any]) -> dict[str, Any]:
    """A pattern with look-around as several without, where there are such."""
    pattern = node.get("pattern")
    patterns = readable_patterns(pattern) if isinstance(pattern, str) else None
    if not patterns:
        return node
    first, *rest = patterns
    parts_of_all = node["allOf"] if isinstance(node.get("allOf"), list) else []
    more = {"allOf": [*parts_of_all, *({"pattern": each} for each in rest)]} if rest else {}
    return {**node, "pattern": first, **more}


def _pattern_of_names(names: Mapping[str, Any]) -> str | None:
    """An expression for the names that a schema describes; None if there is none."""
    pattern, limits = names.get("pattern"), set(names) - {"type", "title", "description"}
    if limits == {"pattern"} and isinstance(pattern, str):
        single = readable_patterns(pattern)
        return pattern if single is None else single[0] if len(single) == 1 else None
    if limits and limits <= {"minLength", "maxLength"}:
        counts = {key: int(min(_number_of(names, key) or 0, LARGEST_COUNT)) for key in limits}
        return f"^(?s:.{{{counts.get('minLength', 0)},{counts.get('maxLength', '')}}})$"
    return None


def _number_of(node: Mapping[str, Any], key: str) -> int | float | None:
    """The number of a keyword; None if it has none."""
    value = node.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


# ── what is wrong, and where ─────────────────────────────────────────────────────────────────────


def _named(problem: str, path: Path) -> GrammarError:
    """The error for a part of a schema."""
    field = ".".join(path)
    return GrammarError(f"{f'at {field}: ' if field else ''}{plain_problem(problem)}", field=field or None)


def plain_problem(problem: str) -> str:
    """The library's message in one line and plain words."""
    message = problem.strip()
    if "regex parse error" in message and (reason := re.search(r"(?m)^\s*error: (.+)$", message)):
        return f"the regular expression cannot be read: {reason[1]}"
    message = re.sub(
        r"^lookarounds not supported.*", "an anchor in the middle of a regular expression is not supported", message
    )
    message = message.replace(
        "Enable 'coerce_one_of' option to approximate oneOf with anyOf", "strict=False reads it as anyOf"
    )
    if keys := re.match(r"Unimplemented keys: \[(.*?)\]", message):
        return f"no grammar can enforce {keys[1]}: leave it out, or use strict=False, which ignores it"
    return message


def _culprit(schema: Mapping[str, Any], problem: str) -> tuple[str, Path]:
    """The problem of the innermost schema that has it by itself, and its place; found within a budget of time."""
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}

    def work() -> tuple[str, Path]:
        stops_at = time.thread_time() + _SECONDS_OF_SEARCH
        path: Path = ()
        node, message = schema, problem
        while True:
            for at, part in _parts(node):
                if time.thread_time() >= stops_at:
                    return message, path
                inner = validated(_compilable({**shared, **part})) if isinstance(part, Mapping) else None
                if inner is not None and (_is_same(inner, message) or _is_required(at, message)):
                    path, node, message = (*path, *at), part, inner
                    break
            else:
                return message, path

    return on_deep_stack(work)


def _is_required(at: Path, problem: str) -> bool:
    """Whether this part is the property of which an object says that no value can have it."""
    return at[0] == "properties" and f"required property '{at[1]}' is unsatisfiable" in problem


def _is_same(inner: str, problem: str) -> bool:
    """Whether it is the same problem; of a definition the library says further where it was used."""
    return inner.partition("\n")[0].strip() == problem.partition("\n")[0].strip()


def _check_width(schema: Mapping[str, Any]) -> None:
    """Raises `GrammarError` for a place with more alternatives than the parser takes in a row."""
    shared = {key: schema[key] for key in ("$defs", "definitions", "x-guidance") if key in schema}
    wide: list[tuple[Path, Mapping[str, Any]]] = []
    stack: list[tuple[Path, Any]] = [((), schema)]
    while stack and len(wide) < _MOST_WIDE:
        path, node = stack.pop()
        if not isinstance(node, Mapping):
            continue
        if ("$ref" not in node or _alternatives(node)) and _width(node, schema) >= _WIDE:
            wide.append((path, node))
        stack += [((*path, *at), part) for at, part in _parts(node)]
    for path, node in wide:
        try:
            check_beginning(_compilable({**shared, **node}))
        except GrammarError as error:
            raise _named(str(error), path) from None


def _width(schema: Any, root: Mapping[str, Any], depth: int = 0) -> int:
    """About how many ways lead on from the beginning of a value."""
    if not isinstance(schema, Mapping) or depth > 16:
        return 1
    reference = schema.get("$ref")
    referred = [target_of(reference, root)] if isinstance(reference, str) else []
    properties = len(schema["properties"]) if isinstance(schema.get("properties"), Mapping) else 0
    width = 1 + properties
    for part in (*referred, *_alternatives(schema)):
        width += _width(part, root, depth + 1)
        if width >= _WIDE:
            break
    return width
