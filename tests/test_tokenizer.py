import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds4mlx.errors import FileError, UsageError
from ds4mlx.tokenizer import Control, Tokenizer
from tests import real_tokenizer

GOLDEN = json.loads((Path(__file__).parent / "golden" / "tokenizer_golden.json").read_text())
CASES = {case["id"]: case for case in GOLDEN["cases"]}
KEYS = [f"tokenizer.ggml.{n}" for n in ("model", "pre", "tokens", "token_type", "merges")]
MODEL, PRE, TOKENS, TYPES, MERGES = KEYS
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"

SPELLINGS = [BOS, EOS, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<dsml:"]
FRAGMENTS = [*SPELLINGS, "<", "｜", "<｜", " ", "  ", "\n", "\r\n", "\0", "\ufeff", "12345", "½"]
FRAGMENTS += ["it's", "Hello", "_x", "日本語", "カナ", "한국어", "e\u0301", "👨\u200d👩", "\u00a0"]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)


def toy_metadata(**changes) -> dict:
    """Begin and end tokens, the 256 bytes in GPT-2's alphabet, and two merges."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    bytes_ = [chr(b) for b in plain] + [chr(256 + i) for i in range(256 - len(plain))]
    tokens = [BOS, EOS, *bytes_, "th", "the", "<｜User｜>"]
    toy = {MODEL: "gpt2", PRE: "joyai-llm", TOKENS: tokens, MERGES: ["t h", "th e"]}
    toy[TYPES] = [3, 3, *[1] * 258, 3]
    return toy | changes


@cache
def toy() -> Tokenizer:
    return Tokenizer.from_gguf(toy_metadata())


@cache
def original():
    from tokenizers import Tokenizer as Backend

    return Backend.from_file(str(real_tokenizer.path()))


# The original's ids -------------------------------------------------------------------------


@pytest.mark.parametrize("id", CASES)
def test_golden_strings_give_the_original_ids_and_come_back(id):
    case, tokenizer = CASES[id], real_tokenizer.tokenizer()
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]


@pytest.mark.parametrize("id", CASES)
def test_golden_strings_with_markers_give_the_original_ids(id):
    case = CASES[id]
    wanted = case.get("ids_with_markers", case["ids"])
    assert real_tokenizer.tokenizer().encode_marked(case["text"]) == wanted


def test_a_tokenizer_json_gives_the_same_tokenizer():
    other = Tokenizer.from_json(real_tokenizer.path())
    for case in CASES.values():
        assert other.encode(case["text"]) == case["ids"]
        assert other.encode_marked(case["text"]) == case.get("ids_with_markers", case["ids"])


@settings(max_examples=300, deadline=None)
@given(texts)
def test_any_text_with_markers_gives_the_original_ids(text):
    got = real_tokenizer.tokenizer().encode_marked(text)
    assert got == original().encode(text, add_special_tokens=False).ids


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 129_279), max_size=20))
def test_any_ids_decode_as_the_original_does(ids):
    got = real_tokenizer.tokenizer().decode(ids)
    assert got == original().decode(ids, skip_special_tokens=False)


# Control tokens -----------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(texts)
def test_text_gives_no_added_token_and_comes_back(text):
    tokenizer = real_tokenizer.tokenizer()
    ids = tokenizer.encode(text)
    assert not any(map(tokenizer.is_added, ids))
    assert tokenizer.decode(ids) == text


def test_a_control_is_one_id_and_the_same_text_is_not():
    tokenizer = real_tokenizer.tokenizer()
    ids = tokenizer.encode_parts([Control("<｜User｜>"), "<｜User｜>", Control("</think>")])
    assert (ids[0], ids[-1]) == (128803, 128822)
    assert ids[1:-1] == tokenizer.encode("<｜User｜>")


def test_stretches_of_text_are_encoded_one_by_one():
    assert toy().encode_parts(["t", "he"]) != toy().encode("the")
    assert toy().encode_parts(["t", "he"]) == toy().encode("t") + toy().encode("he")


def test_a_control_that_the_vocabulary_lacks_is_named():
    with pytest.raises(FileError, match="<｜Assistant｜>"):
        toy().encode_parts([Control("<｜Assistant｜>")])


def test_special_ids_come_from_the_texts():
    assert (toy().bos, toy().eos, toy().special("<｜User｜>")) == (0, 1, 260)
    assert toy().special("the") is None
    assert toy().special("<think>") is None


def test_generation_stops_at_the_end_token_and_at_what_would_forge_a_turn():
    assert real_tokenizer.tokenizer().stop_ids == {0, 1, 128803, 128804}
    assert toy().stop_ids == {0, 1, 260}


def test_chat_roles_need_all_their_tokens():
    assert real_tokenizer.tokenizer().has_chat_roles
    assert not toy().has_chat_roles


def test_added_tokens_can_be_left_out_of_decoded_text():
    ids = [0, *toy().encode("a"), 260, *toy().encode("b"), 1]
    assert toy().decode(ids) == f"{BOS}a<｜User｜>b{EOS}"
    assert toy().decode(ids, special=False) == "ab"


def test_half_a_surrogate_pair_is_refused_with_its_place():
    with pytest.raises(UsageError, match="character 2"):
        toy().encode("ab\ud83d")


# Streaming ----------------------------------------------------------------------------------


def streamed(tokenizer, ids, size):
    """Pieces of `size` ids, then what flush gives."""
    stream = tokenizer.stream()
    blocks = [ids[i : i + size] for i in range(0, len(ids), size)]
    return ["".join(map(stream.push, block)) for block in blocks] + [stream.flush()]


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize(
    "text", ["🇫🇷🇯🇵", "👨‍👩‍👧‍👦", "שָׁלוֹם", "e\u0301e\u0301", "日本語", "\0a\r\n"], ids=ascii
)
def test_pieces_are_whole_characters_and_join_to_the_text(text, size):
    pieces = streamed(toy(), toy().encode(text), size)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 260) | st.sampled_from([224, 225, 241, 190, 160]), max_size=16))
def test_pieces_join_to_the_decoded_bytes_even_where_they_are_no_utf8(ids):
    written = b"".join(map(toy().token_bytes, ids)).decode("utf-8", "replace")
    assert toy().decode(ids) == written
    for size in range(1, 7):
        assert "".join(streamed(toy(), ids, size)) == written


def test_a_cut_character_is_flushed_once_at_the_end():
    ids = toy().encode("é")
    stream = toy().stream()
    assert [stream.push(ids[0]), stream.flush(), stream.flush()] == ["", "\ufffd", ""]


# Files that do not fit ----------------------------------------------------------------------


def test_all_missing_keys_are_named_at_once():
    with pytest.raises(FileError) as error:
        Tokenizer.from_gguf({MODEL: "gpt2"})
    assert all(key in str(error.value) for key in KEYS[1:])


@pytest.mark.parametrize(
    "changes, says",
    [
        ({PRE: "llama-bpe"}, "llama-bpe.*joyai-llm"),
        ({MODEL: "llama"}, "'llama'.*gpt2"),
        ({MODEL: ["gpt2"]}, r"\['gpt2'\]"),
        ({TOKENS: "abc"}, "tokens is 'abc'"),
        ({MERGES: [1]}, r"merges is \[1\]"),
        ({TYPES: [3, 3, 1]}, "3 entries, wanted 261"),
        ({TYPES: 7}, "no entries"),
        ({MERGES: ["t h", "th x", "q q"]}, "'th x'.*'q q'"),
        ({MERGES: ["t h", "the"]}, "'the'"),
        ({MERGES: ["t h", "th "]}, "two tokens.*'th '"),
        ({TYPES: [3, 3, *[1] * 257, 4, 3]}, "plain text would become.*'the'"),
        ({TYPES: [1] * 261}, f"missing.*{BOS} {EOS}"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(changes, says):
    with pytest.raises(FileError, match=says):
        Tokenizer.from_gguf(toy_metadata(**changes))


def test_several_problems_are_reported_together():
    tokens = toy_metadata()[TOKENS]
    tokens[tokens.index("A")] = "B"
    with pytest.raises(FileError, match="twice: 'B'.*merges.*'q q'"):
        Tokenizer.from_gguf(toy_metadata(**{TOKENS: tokens, MERGES: ["q q"]}))


def test_text_is_refused_where_a_byte_has_no_token():
    tokens = toy_metadata()[TOKENS]
    tokens[tokens.index("A")] = "nothing"
    with pytest.raises(FileError, match="no token for 0x41"):
        Tokenizer.from_gguf(toy_metadata(**{TOKENS: tokens})).encode("a")


def json_file(folder: Path, **changes) -> Path:
    """The toy as a tokenizer.json."""
    data = json.loads(real_tokenizer.path().read_text("utf-8"))
    toy = toy_metadata()
    data["model"]["vocab"] = {text: i for i, text in enumerate(toy[TOKENS])}
    data["model"]["merges"] = [merge.split() for merge in toy[MERGES]]
    data["added_tokens"] = [{"id": i, "content": toy[TOKENS][i]} for i in (0, 1, 260)]
    data["model"] |= changes.pop("model", {})
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(data | changes))
    return path


def test_a_small_tokenizer_json_gives_the_same_as_its_gguf(tmp_path):
    other = Tokenizer.from_json(json_file(tmp_path))
    text = f"the other{BOS} <｜User｜>"
    assert other.encode(text) == toy().encode(text)
    assert other.encode_marked(text) == toy().encode_marked(text)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"pre_tokenizer": {"type": "ByteLevel"}}, "pretokenizers"),
        ({"pre_tokenizer": None}, "not a byte-level BPE"),
        ({"pre_tokenizer": {"pretokenizers": []}}, "0 splits"),
        ({"normalizer": {"type": "NFC"}}, "NFC"),
        ({"model": {"ignore_merges": True}}, "ignore_merges"),
        ({"model": {"vocab": {"a": 5}}}, "ids are not 0 to"),
        ({"model": {"vocab": {"a": 0.0}}}, "not a byte-level BPE"),
        ({"model": {"vocab": {"\ud800": 2}}}, "not a byte-level BPE"),
        ({"added_tokens": [{"id": 0.0, "content": "a"}]}, "not a byte-level BPE"),
        ({"normalizer": "x" * 9999}, "normalizer 'xxx.{,80}$"),
        ({"model": None}, "not a byte-level BPE"),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused(tmp_path, changes, says):
    if changes.get("model", 0) is None:
        (path := tmp_path / "tokenizer.json").write_text("{}")
    else:
        path = json_file(tmp_path, **changes)
    with pytest.raises(FileError, match=says):
        Tokenizer.from_json(path)


def test_opening_does_not_import_the_library_yet():
    code = "import sys, ds4mlx.tokenizer; sys.exit('tokenizers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
