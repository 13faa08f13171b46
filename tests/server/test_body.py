"""From bytes to Structs: whatever the bytes are, a Struct or an InvalidRequestError."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmserve.errors import InvalidRequestError
from llmserve.sampling_params import MAX_STOP_STRINGS, SamplingParams
from llmserve.server.body import MAX_DEPTH, decode
from llmserve.server.schemas import ChatRequest, CompletionRequest

CHAT = '"model":"m","messages":[{"role":"user","content":"hi"}]'


def chat(extra: str) -> ChatRequest:
    return decode(f"{{{CHAT},{extra}}}".encode(), ChatRequest)


def chat_params(extra: str, **defaults: float) -> SamplingParams:
    request = chat(extra)
    request.check()
    params = request.sampling_params(defaults, max_tokens=request.output_limit(), logprobs=request.num_logprobs())
    params.validate(1000)
    return params


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b'"text"',
        b"null",
        b"{" + CHAT.encode(),
        b"\xef\xbb\xbf{" + CHAT.encode() + b"}",
        (f"{{{CHAT}}}").encode("utf-16"),
        b'{"model":"\xff"}',
        b'{"unknown":"\xff",' + CHAT.encode() + b"}",
        f'{{{CHAT},"x":NaN}}'.encode(),
        f'{{{CHAT},"x":-Infinity}}'.encode(),
        f'{{{CHAT},"temperature":1e999}}'.encode(),
        f'{{{CHAT},"model":"other"}}'.encode(),
        f'{{{CHAT},"metadata":{{"a":1,"a":2}}}}'.encode(),
        f'{{{CHAT},"x":{"1" * 5000}}}'.encode(),
        f'{{{CHAT},"x":"\\ud800"}}'.encode(),
        b'{"model":"\\ud800","messages":[{"role":"user","content":"\\udc00"}]}',
        b"[" * 10_000 + b"]" * 10_000,
        b'{"x":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
        b"[" * 10_000,
        f'{{{CHAT},"x":{"[" * 10_000}{"]" * 10_000}}}'.encode(),
        f'{{{CHAT},"x":{"[" * (MAX_DEPTH + 1)}{"]" * (MAX_DEPTH + 1)}}}'.encode(),
        f'{{{CHAT},"x":[{"[]," * 200_000}[]]}}'.encode(),
        b'{"x":"' + b'\\"' * 500_000 + b"[" * 100,
    ],
)
def test_bad_bodies_are_refused_quickly(body: bytes) -> None:
    """Not JSON, BOM, other encodings, NaN, duplicate keys, lone surrogates, nesting of 10,000: all 400."""
    started = time.process_time()
    with pytest.raises(InvalidRequestError) as caught:
        decode(body, ChatRequest)
    assert caught.value.message
    assert time.process_time() - started < 2.0


def test_brackets_in_text_are_not_nesting() -> None:
    body = f'{{"model":"m","messages":[{{"role":"user","content":"{"[" * 5000}\\"{"{" * 5000}"}}]}}'
    assert decode(body.encode(), ChatRequest).messages[0].content == "[" * 5000 + '"' + "{" * 5000


def test_nesting_below_the_limit_and_many_messages_pass() -> None:
    depth = MAX_DEPTH - 2
    request = chat(f'"tools":[],"chat_template_kwargs":{{"a":{"[" * (depth - 1)}{"]" * (depth - 1)}}}')
    assert request.chat_template_kwargs is not None
    many = ",".join('{"role":"user","content":"hi"}' for _ in range(2000))
    assert len(decode(f'{{"model":"m","messages":[{many}]}}'.encode(), ChatRequest).messages) == 2000


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:\\0123eE.-+ntfu\ud800', max_size=200))
def test_any_bytes_give_a_struct_or_a_refusal(data: bytes | str) -> None:
    body = data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass")
    for kind in (ChatRequest, CompletionRequest):
        try:
            decode(body, kind)
        except InvalidRequestError as error:
            assert error.message


def test_unknown_fields_and_nulls_are_as_if_absent() -> None:
    nulls = ",".join(f'"{name}":null' for name in ("stop", "n", "seed", "temperature", "logit_bias", "stream", "tools"))
    params = chat_params(f'{nulls},"store":true,"service_tier":"auto","metadata":{{"a":"b"}},"user":"u","xyz":[1]')
    assert params == SamplingParams()


def test_model_defaults_apply_only_to_what_is_not_given() -> None:
    """Sampling defaults come from the model's generation_config."""
    params = chat_params('"temperature":0.1', temperature=0.7, top_p=0.9)
    assert (params.temperature, params.top_p) == (0.1, 0.9)


def test_whole_numbers_may_be_written_as_floats() -> None:
    params = chat_params('"n":2.0,"max_tokens":5.0,"seed":3.0,"top_k":4.0,"stop_token_ids":[7.0]')
    assert (params.n, params.max_tokens, params.seed, params.top_k, params.stop_token_ids) == (2, 5, 3, 4, [7])


def test_max_completion_tokens_wins() -> None:
    assert chat_params('"max_tokens":5,"max_completion_tokens":7').max_tokens == 7


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ('"n":1.5', "n"),
        ('"n":0', "n"),
        ('"n":"2"', "n"),
        ('"n":true', "n"),
        ('"n":1000000', "n"),
        ('"temperature":-1', "temperature"),
        ('"temperature":"hot"', "temperature"),
        ('"top_p":0', "top_p"),
        ('"top_k":-2', "top_k"),
        ('"seed":9223372036854775808', "seed"),
        ('"max_tokens":0', "max_tokens"),
        ('"max_completion_tokens":0', "max_tokens"),
        ('"stop":""', "stop"),
        ('"stop":[""]', "stop"),
        ('"stop":["a",null]', "stop"),
        ('"stop":{"a":1}', "stop"),
        (f'"stop":{["x"] * 10_000}'.replace("'", '"'), "stop"),
        (f'"stop":{["x"] * (MAX_STOP_STRINGS + 1)}'.replace("'", '"'), "stop"),
        ('"stop_token_ids":[1000]', "stop_token_ids"),
        ('"logit_bias":{"abc":1}', "logit_bias"),
        ('"logit_bias":{"-1":1}', "logit_bias"),
        ('"logit_bias":{"1.5":1}', "logit_bias"),
        ('"logit_bias":{"²":1}', "logit_bias"),
        ('"logit_bias":{"99999999":-100}', "logit_bias"),
        ('"logit_bias":{"1":101}', "logit_bias"),
        ('"logit_bias":{"1":1e38}', "logit_bias"),
        ('"logit_bias":{"1":"x"}', "logit_bias"),
        (f'"logit_bias":{ {str(i): 1 for i in range(150_000)} }'.replace("'", '"'), "logit_bias"),
        ('"top_logprobs":5', "top_logprobs"),
        ('"logprobs":true,"top_logprobs":21', "top_logprobs"),
        ('"logprobs":true,"top_logprobs":-1', "top_logprobs"),
        ('"logprobs":5', "logprobs"),
        ('"min_tokens":5,"max_tokens":4', "min_tokens"),
        ('"stream_options":{}', "stream_options"),
        ('"stream":"yes"', "stream"),
        ('"response_format":{"type":"json_object"}', "response_format"),
        ('"tool_choice":"required"', "tool_choice"),
        ('"tool_choice":{"type":"function","function":{"name":"f"}}', "tool_choice"),
        ('"tools":[{"type":"function"}]', "tools"),
        ('"tools":[1]', "tools"),
        ('"cache_salt":"%s"' % ("x" * 1000), "cache_salt"),
        ('"add_generation_prompt":true,"continue_final_message":true', "add_generation_prompt"),
        ('"continue_final_message":true', "continue_final_message"),
    ],
)
def test_wrong_values_name_their_field(extra: str, param: str) -> None:
    """B010 (one stop limit), B031, B032, B035 (logit_bias), B037 (max_tokens=0), empty and too many stop strings."""
    with pytest.raises(InvalidRequestError) as caught:
        chat_params(extra)
    assert caught.value.param == param


@pytest.mark.parametrize("stop", ['"x"', '["x"]'])
def test_stop_as_text_or_list(stop: str) -> None:
    assert chat_params(f'"stop":{stop}').stop == ["x"]


@pytest.mark.parametrize(
    "message",
    [
        '{"role":"wizard","content":"hi"}',
        '{"role":"user"}',
        '{"role":"user","content":null}',
        '{"content":"hi"}',
        '{"role":"user","content":5}',
        '{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}',
        '{"role":"user","content":[{"type":"text"}]}',
        '{"role":"user","content":["hi"]}',
        '{"role":"assistant","tool_calls":[{"function":{}}]}',
        "null",
    ],
)
def test_wrong_messages(message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(f'{{"model":"m","messages":[{message}]}}'.encode(), ChatRequest).check()
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "prompt",
    ['""', '[""]', "[]", "[[]]", '["a",""]', "[1,[2]]", '[1,"a"]', "[1.5]", "null", "5", "[null]", "[true]", '{"a":1}'],
)
def test_wrong_prompts(prompt: str) -> None:
    """B038: an empty prompt in any spelling is refused before it reaches the engine."""
    with pytest.raises(InvalidRequestError) as caught:
        decode(f'{{"model":"m","prompt":{prompt}}}'.encode(), CompletionRequest).prompts()
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [('"a"', ["a"]), ('["a","b"]', ["a", "b"]), ("[1,2.0]", [[1, 2]]), ("[[1],[2,3]]", [[1], [2, 3]])],
)
def test_prompt_spellings(prompt: str, expected: list[object]) -> None:
    assert decode(f'{{"model":"m","prompt":{prompt}}}'.encode(), CompletionRequest).prompts() == expected


@pytest.mark.parametrize(("extra", "param"), [('"suffix":"x"', "suffix"), ('"best_of":3,"n":2', "best_of")])
def test_unsupported_completion_fields(extra: str, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(f'{{"model":"m","prompt":"x",{extra}}}'.encode(), CompletionRequest).check()
    assert caught.value.param == param
