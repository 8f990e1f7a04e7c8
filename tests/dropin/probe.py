# SPDX-License-Identifier: Apache-2.0
"""What callers see of the library's module, as JSON: `probe.py MODULE ...` in its environment.

For each MODULE, what importing it came to, and for each name of `modelopt.torch.utils.distributed`
its signature: the name, kind and default of every parameter.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

from modelopt.torch.utils import distributed


def _outcome(module: str) -> str:
    try:
        importlib.import_module(module)
    # Whatever it is, it must be the same with and without our files.
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "imported"


def _callables() -> Iterator[tuple[str, Any]]:
    """Yield what the module itself defines: functions, classes and their methods."""
    for name, value in vars(distributed).items():
        if getattr(value, "__module__", None) == distributed.__name__ and callable(value):
            yield name, value
            for attribute in vars(value) if inspect.isclass(value) else ():
                member = getattr(value, attribute)
                if inspect.isfunction(member):
                    yield f"{name}.{attribute}", member


def _parameters(value: Any) -> list[tuple[str, str, str]]:
    parameters = inspect.signature(value).parameters.values()
    return [(p.name, p.kind.name, repr(p.default)) for p in parameters]


if __name__ == "__main__":
    found = {
        "file": distributed.__file__,
        "names": sorted(vars(distributed)),
        "imports": {module: _outcome(module) for module in sys.argv[1:]},
        "signatures": {name: _parameters(value) for name, value in _callables()},
    }
    # Modules may print while they are imported.
    print("\n" + json.dumps(found))
