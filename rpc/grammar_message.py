"""A grammar as it travels between processes, and how it comes to its request in a worker."""

from typing import Final

from relevo.v1 import common_pb2

from engine.request import Request
from grammar.grammar import Grammar, GrammarKind
from grammar.library import GrammarLibrary
from rpc.errors import InvalidRequestError

_NUMBERS: Final = {
    GrammarKind.JSON_SCHEMA: common_pb2.Grammar.KIND_JSON_SCHEMA,
    GrammarKind.REGEX: common_pb2.Grammar.KIND_REGEX,
    GrammarKind.CHOICE: common_pb2.Grammar.KIND_CHOICE,
    GrammarKind.CFG: common_pb2.Grammar.KIND_CFG,
}
_KINDS: Final = {number: kind for kind, number in _NUMBERS.items()}


def to_proto(grammar: Grammar) -> common_pb2.Grammar:
    """Return the message for a grammar."""
    return common_pb2.Grammar(kind=_NUMBERS[grammar.kind], text=grammar.text)


def from_proto(params: common_pb2.SamplingParams) -> Grammar | None:
    """Return the grammar, if there is one; InvalidRequestError when it makes no sense."""
    if not params.HasField("grammar"):
        return None
    kind = _KINDS.get(params.grammar.kind)
    if kind is None:
        raise InvalidRequestError(f"Got {params.grammar.kind = } but expected a known kind")
    try:
        return Grammar(kind=kind, text=params.grammar.text)
    except ValueError as error:
        raise InvalidRequestError(f"grammar: {error}") from error


async def attach_grammar(
    request: Request, params: common_pb2.SamplingParams, grammars: GrammarLibrary
) -> None:
    """Compile the grammar of a message, if it has one, for the request that was made of it.

    InvalidRequestError when it cannot be: this worker's model then differs from the ingress's.
    """
    grammar = from_proto(params)
    if grammar is None:
        return
    try:
        request.new_token_mask = (await grammars.get(grammar)).new_mask
    except ValueError as error:
        raise InvalidRequestError(f"grammar: {error}") from error
