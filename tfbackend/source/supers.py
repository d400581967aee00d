"""Methods that say `super()`, which only works in the class body they were written in.

super().forward(x)        ->        super(_Owner_forward, self).forward(x)
"""

from __future__ import annotations

import ast

from tfbackend.source.edits import Edit
from tfbackend.source.forward import ForwardSource, SourceError, owner_name


def explicit_supers(source: ForwardSource) -> list[Edit]:
    """Edits that let each `super()` of a method name the class that the method was written in.

    Raises:
        SourceError: it uses that class in another way.
    """
    if "__class__" not in source.function.__code__.co_freevars:
        return []
    names = [node for node in ast.walk(source.tree) if isinstance(node, ast.Name)]
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call) and not node.args]
    supers = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "super"]
    if sum(name.id in ("super", "__class__") for name in names) != len(supers):
        raise SourceError(f"{source.function.__qualname__} uses super in a way of its own")
    made = f"super({owner_name(source.name)}, {source.me})"
    return [Edit(*source.offsets(call), made, "super") for call in supers]
