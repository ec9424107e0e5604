"""Text as it is drawn: whole characters, stop strings across tokens, however many at a time."""

import numpy as np
import pytest
import tokenizers

from jrl.errors import UserError
from jrl.models.file_tokenizer import FileTokenizer
from jrl.models.tokenizer import CharTokenizer
from jrl.sampling.text import TextStream, check_stop


def byte_tokenizer():
    """One token for each byte, and a special one; id 256 is <end>."""
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({c: i for i, c in enumerate(sorted(letters))}, [])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return FileTokenizer(
        backend, source="here", stop_ids=(256,), pad_id=256, special={}, templates={}
    )


BYTES = byte_tokenizer()
TEXT = "naïve 😀 日本語 ok"


def pushed(tokens, sizes, stop=()):
    """Pieces of text from tokens in chunks of this size."""
    stream, pieces = TextStream(BYTES, stop), []
    at = 0
    for size in sizes:
        pieces.append(stream.push(tokens[at : at + size]))
        at += size
    return [*pieces, stream.close()], stream


def test_no_piece_cuts_a_character():
    tokens = BYTES.encode(TEXT)
    assert len(tokens) > len(TEXT)
    pieces, stream = pushed(tokens, [1] * len(tokens))
    assert "".join(pieces) == stream.text == TEXT
    assert "\ufffd" not in "".join(pieces)
    assert pieces[0] == "n"  # nothing waits that need not
    assert stream.ends[-1] == len(TEXT)
    assert stream.ends == sorted(stream.ends)


@pytest.mark.parametrize("seed", range(8))
def test_the_text_depends_on_the_tokens_alone(seed):
    """Also where they are no UTF-8 at all."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 256, 40).tolist()
    stop = ("ab", BYTES.decode(tokens[20:22])) if seed % 2 else ()
    one, _ = pushed(tokens, [1] * 40, stop)
    for sizes in ([40], [7] * 6, random.integers(1, 5, 40).tolist()):
        assert "".join(pushed(tokens, sizes, stop)[0]) == "".join(one)


def test_a_stop_string_over_several_tokens_is_found_and_left_out():
    tokens = BYTES.encode("one END two")
    pieces, stream = pushed(tokens, [1] * len(tokens), ("END", "two"))
    assert "".join(pieces) == stream.text == "one "
    assert stream.stopped
    # What may begin a stop string waits; what turns out not to comes with the next piece.
    pieces, stream = pushed(BYTES.encode("EN route"), [1] * 8, ("END",))
    assert pieces == ["", "", "EN ", "r", "o", "u", "t", "e", ""]
    assert not stream.stopped


def test_the_earliest_stop_string_counts():
    _, stream = pushed(BYTES.encode("a bc d"), [6], ("d", "bc", "c"))
    assert stream.text == "a "


def test_the_rest_comes_at_the_end():
    tokens = BYTES.encode("x😀")[:-1]  # three of the four bytes
    pieces, _ = pushed([*tokens, *BYTES.encode("E")], [len(tokens), 1], ("END",))
    assert "".join(pieces) == "x\ufffdE"
    stream = TextStream(BYTES, ("END",))
    assert stream.push(tokens) == "x"
    assert stream.close() == "\ufffd"


def test_stop_strings_that_never_match_are_named():
    for fine in ("\n\n", " x", "日", "END"):
        check_stop(BYTES, fine)
    with pytest.raises(UserError, match=r"stop = '<end>' can never match"):
        check_stop(BYTES, "<end>")
    with pytest.raises(UserError, match="empty stop string"):
        check_stop(BYTES, "")
    check_stop(CharTokenizer(), "10>")
    with pytest.raises(UserError, match="'A' in"):
        check_stop(CharTokenizer(), "ABC")
