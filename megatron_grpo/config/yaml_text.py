"""YAML as configs have it, read and written."""

import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """YAML 1.1 with three fixes: `3e-5` is a number, `2026-11-29` is a text, a duplicate key is an
    error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Raise ConstructorError for a duplicate key; PyYAML would silently use its last value."""
        keys = []
        for key, _ in node.value:
            if key.value in keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            keys.append(key.value)
        return super().construct_mapping(node, deep)


class Dumper(yaml.SafeDumper):
    """Quotes each text that `Loader` would read as something else, such as `3e-5`."""


def _quoted(dumper: Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML writes these line breaks as they are, and reads them as spaces.
    style = '"' if any(each in text for each in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


Dumper.add_representer(str, _quoted)

# No key takes a date, so `2026-11-29` must stay the text that users wrote.
Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# PyYAML takes a float only with a dot and a signed exponent: `3e-5` would be a text. The dumper
# needs the same resolver to quote texts such as `3e-5`.
for _kind in (Loader, Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def dump(value: Any) -> str:
    """Write block style in the given order; `Loader` reads an equal value back."""
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True)
