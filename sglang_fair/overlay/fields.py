"""Holds what is sent to this replica against the table of `sglang_fair.common.fields`, before the scheduler gets any of
it. Runs where HTTP is answered.

A body of a route that the table has is judged as it was sent, so that an error names the sender's own field; whatever
else becomes a request of the engine, by its fields.
"""

from dataclasses import fields
from functools import cache
from typing import Any

from sglang_fair.common.fields import GENERATE, ROUTES, Direct, Facts, Rule, check, judge
from sglang_fair.overlay import config
from sglang_fair.overlay.identity import is_health_check


def judge_request(manager: Any, obj: Any, request: Any) -> None:
    """Raises `Wrong`, a ValueError, which SGLang answers with 400. `obj` is its generate or embedding input."""
    if request is None or is_health_check(request):
        return
    facts = _facts(manager.model_config.vocab_size)
    path, body = request.scope.get("path"), getattr(request, "_json", None)
    if path in ROUTES and isinstance(body, dict):
        judge(path, body, facts, at_replica=True)
        return
    for one in fields(obj):
        value, rule = getattr(obj, one.name, None), GENERATE.get(one.name, _ANY)
        if value is not None and value != one.default:
            check(one.name, rule.rule if isinstance(rule, Direct) else rule, value, facts)


_ANY = Rule()


@cache
def _facts(vocabulary: int) -> Facts:
    """Of a model with so many token ids, and of what the operator allows."""
    return config.read().facts._replace(vocabulary=vocabulary)
