"""Reasoning and tool calls: parsed out of text, and as the official client reads them."""

from __future__ import annotations

import json

import pytest

from compiled_attn.serve.output_parser import _QWEN, _QWEN_3_5, OutputParser, Reasoning, ToolCall
from tests.compiled_attn.serve.conftest import NAME

CALL = ToolCall("look", '{"at": "moon"}')
QWEN = '<think>hm</think>On it.<tool_call>{"name": "look", "arguments": {"at": "moon"}}</tool_call>'
QWEN_3_5 = (
    "<think>hm</think>On it."
    "<tool_call><function=look><parameter=at>moon</parameter></function></tool_call>"
)
HALF_PAIR = '{}{{"name": "look", "arguments": {{"at": 1}}, "name": "\\ud800"}}{}'
NO_JSON = '{}{{"name": "look", "arguments": {{"at": NaN}}}}{}'
ANCHOR = {"start_anchor": "<model>"}  # of the tests' chat template
TEXTS = pytest.mark.parametrize(
    ("template", "text"), [(_QWEN | ANCHOR, QWEN), (_QWEN_3_5 | ANCHOR, QWEN_3_5)]
)
CHAT = [{"role": "user", "content": "Where?"}]


def parser_of(llm, template):
    return OutputParser(llm, template, llm.tokenizer.encode(CHAT), None)


def tokens_of(llm, text):
    return llm.tokenizer.of_transformers(text, add_special_tokens=False)["input_ids"]


def pieces_of(llm, template, text):
    parser = parser_of(llm, template)
    pieces = parser.start()
    for token in tokens_of(llm, text):
        pieces += parser.put(token)
    return [*pieces, *parser.finish()]


@TEXTS
def test_an_answer_is_parsed_whole_and_token_by_token(alone, template, text):
    whole = parser_of(alone, template).parse(tokens_of(alone, text))
    assert (whole.text, whole.reasoning, whole.tool_calls) == ("On it.", "hm", [CALL])
    pieces = pieces_of(alone, template, text)
    assert "".join(each for each in pieces if isinstance(each, Reasoning)) == "hm"
    assert "".join(each for each in pieces if type(each) is str) == "On it."
    assert [each for each in pieces if isinstance(each, ToolCall)] == [CALL]


@pytest.mark.parametrize(
    ("text", "shown", "calls"),
    [
        (f"{QWEN}Done.", "On it.Done.", [CALL]),
        ('On it.<tool_call>{"name": </tool_call>Sorry.', 'On it.{"name": Sorry.', []),
        ('On it.<tool_call>{"moon": 1}</tool_call>Sorry.', 'On it.{"moon": 1}Sorry.', []),
        ('On it.<tool_call>{"name": "look", ', 'On it.{"name": "look",', []),
        (HALF_PAIR.format("<tool_call>", "</tool_call>"), HALF_PAIR.format("", ""), []),
        (NO_JSON.format("<tool_call>", "</tool_call>"), NO_JSON.format("", ""), []),
    ],
    ids=["between text", "malformed", "nameless", "cut", "half a surrogate pair", "not a number"],
)
def test_a_call_that_cannot_be_parsed_is_text(alone, text, shown, calls):
    whole = parser_of(alone, _QWEN | ANCHOR).parse(tokens_of(alone, text))
    assert (whole.text, whole.tool_calls) == (shown, calls)
    pieces = pieces_of(alone, _QWEN | ANCHOR, text)
    assert "".join(each for each in pieces if type(each) is str).strip() == shown
    assert [each for each in pieces if isinstance(each, ToolCall)] == calls


@pytest.mark.parametrize(
    ("template", "start", "end"),
    [
        (_QWEN, "x", "x"),
        (_QWEN_3_5, "x", ""),
        (
            _QWEN_3_5,
            "<tool_call><function=f><parameter=a>x",
            "x</parameter></function></tool_call>",
        ),
    ],
)
def test_blanks_take_no_longer_the_more_there_are(alone, template, start, end):
    """In quadratic time these would take minutes, in which the server answers nobody."""
    blanks = 300_000
    parsed = parser_of(alone, template | ANCHOR).parse(tokens_of(alone, start + " " * blanks + end))
    if not parsed.tool_calls:
        assert parsed.text == (start + " " * blanks + end).strip()
    else:
        assert len(parsed.tool_calls[0].arguments) == blanks + len('{"a": "xx"}')


@pytest.fixture
def calling(server, monkeypatch):
    """The server, with a template that finds a call in whatever the model says."""
    llm = server.model.llm
    monkeypatch.setattr(
        llm.tokenizer.of_transformers, "response_template", _QWEN | ANCHOR, raising=False
    )
    tokens, begun = iter(()), []
    put, parse = OutputParser.put, OutputParser.parse

    def next_of_text(parser, token):
        nonlocal tokens
        if parser not in begun:
            begun.append(parser)
            tokens = iter(tokens_of(llm, QWEN))
        return put(parser, next(tokens))

    def whole_text(parser, tokens):
        return parse(parser, tokens_of(llm, QWEN))

    monkeypatch.setattr(OutputParser, "put", next_of_text)
    monkeypatch.setattr(OutputParser, "parse", whole_text)
    server.length = len(tokens_of(llm, QWEN))
    yield server


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_has_reasoning_and_calls_next_to_its_text(calling, stream):
    settings = {"model": NAME, "messages": CHAT, "max_tokens": calling.length, "stream": stream}
    given = calling.client.chat.completions.create(**settings)
    if not stream:
        choice = given.choices[0]
        (call,) = choice.message.tool_calls
        said, thought, reason = (
            choice.message.content,
            choice.message.reasoning_content,
            choice.finish_reason,
        )
    else:
        choices = [chunk.choices[0] for chunk in given]
        said = "".join(each.delta.content or "" for each in choices)
        thought = "".join(getattr(each.delta, "reasoning_content", None) or "" for each in choices)
        ((call,),) = [each.delta.tool_calls for each in choices if each.delta.tool_calls]
        reason = choices[-1].finish_reason
    assert (said, thought, reason) == ("On it.", "hm", "tool_calls")
    assert (call.type, call.function.name, call.function.arguments) == ("function", *CALL)


def test_a_response_has_the_same_items_whole_and_as_a_stream(calling):
    settings = {"model": NAME, "input": "Where?", "max_output_tokens": calling.length}
    whole = calling.client.responses.create(**settings).output
    events = [*calling.client.responses.create(**settings, stream=True)]
    streamed = events[-1].response.output
    done = [each.item for each in events if each.type == "response.output_item.done"]
    for output in (whole, streamed, done):
        thought, message, call = output
        assert thought.content[0].text == "hm" and message.content[0].text == "On it."
        assert json.loads(call.arguments) == {"at": "moon"} and call.name == "look"
    assert [event.sequence_number for event in events] == [*range(len(events))]
    deltas = [each for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(each.delta for each in deltas) == "hm"
