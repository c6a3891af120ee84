"""Schemas as clients send them, for the tests that make outputs match."""

from typing import Any

SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "person": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": ["string", "null"], "format": "email", "maxLength": 30},
        },
        "required": ["name", "age", "email"],
        "additionalProperties": False,
    },
    "enum and const": {
        "type": "object",
        "properties": {
            "kind": {"const": "event"},
            "level": {"enum": ["debug", "info", 'wa"rn', None, 3]},
        },
        "required": ["kind", "level"],
        "additionalProperties": False,
    },
    "array of pairs": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}],
        "items": {
            "type": "array",
            "items": {"type": "number", "minimum": -1, "exclusiveMaximum": 1},
            "minItems": 2,
            "maxItems": 2,
        },
        "minItems": 1,
        "maxItems": 3,
    },
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": -9, "maximum": 9},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["value", "next"],
                "additionalProperties": False,
            }
        },
    },
    "tagged union": {
        "oneOf": [
            {
                "type": "object",
                "properties": {"t": {"const": "circle"}, "r": {"type": "number", "minimum": 0}},
                "required": ["t", "r"],
                "additionalProperties": False,
            },
            {
                "type": "object",
                "properties": {"t": {"const": "square"}, "side": {"type": "integer"}},
                "required": ["t", "side"],
                "additionalProperties": False,
            },
        ]
    },
    "pattern and formats": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "day": {"type": "string", "format": "date"},
            "key": {"type": "string", "format": "uuid"},
        },
        "required": ["id", "day", "key"],
        "additionalProperties": False,
    },
    "map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "maxProperties": 3,
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"a": {"minimum": 3, "maximum": 7}, "b": {"type": "boolean"}}},
        ],
        "additionalProperties": False,
        "properties": {"a": True, "b": True},
    },
    "multiple of": {"type": "integer", "multipleOf": 7, "minimum": -100, "maximum": 1000},
    "string only": {"type": "string", "maxLength": 8},
}

# Name -> schema, and a word of why it is refused.
REFUSED: dict[str, tuple[object, str]] = {
    "unknown keyword of the standard": ({"uniqueItems": True, "type": "array"}, "uniqueItems"),
    "not": ({"not": {"type": "string"}}, "not"),
    "conditions": ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "then"),
    "one of that overlaps": ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
    "unknown format": ({"type": "string", "format": "wibble"}, "wibble"),
    "look-around": ({"type": "string", "pattern": "(?=x)"}, "look"),
    "broken pattern": ({"type": "string", "pattern": "(("}, "regex"),
    "remote reference": ({"$ref": "http://127.0.0.1:9/x"}, "127.0.0.1"),
    "file reference": ({"$ref": "file:///etc/passwd"}, "passwd"),
    "missing reference": ({"$ref": "#/$defs/none"}, "none"),
    "reference to itself": ({"$ref": "#"}, "match"),
    "empty enum": ({"enum": []}, "nsatisfiable"),
    "minimum above maximum": ({"type": "integer", "minimum": 5, "maximum": 1}, "minimum"),
    "contradiction": ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "types"),
    "unknown type": ({"type": "wibble"}, "wibble"),
    "wrong kind of value": ({"type": "object", "required": "a"}, "required"),
    "told to look away": ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
}
