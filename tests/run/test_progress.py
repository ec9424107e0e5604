"""Progress on a terminal and in a pipe, with a clock that the test moves."""

import io

from jrl.run.progress import Progress, above_live_line, duration


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_in_a_pipe_come_at_most_once_a_second_and_at_the_end():
    clock, out = Clock(), io.StringIO()
    with Progress("train", total=10, file=out, clock=clock) as progress:
        for step in range(1, 11):
            clock.now += 0.4
            progress.step(step, {"reward": step / 10, "loss": 1.0, "tokens_per_second": 2500.0})
    lines = out.getvalue().splitlines()
    assert lines == [
        "train  step 1/10  reward 0.1000  2,500 tokens/s",
        "train  step 4/10  reward 0.4000  2,500 tokens/s  left 0:02",
        "train  step 7/10  reward 0.7000  2,500 tokens/s  left 0:01",
        "train  step 10/10  reward 1.0000  2,500 tokens/s",
    ]


def test_time_left_ignores_the_first_step_which_compiles():
    clock = Clock()
    with Progress("train", total=1000, file=io.StringIO(), clock=clock) as progress:
        assert progress.seconds_left() is None
        clock.now = 100.0  # compiling
        progress.step(1, {})
        assert progress.seconds_left() is None
        clock.now += 1.0
        progress.step(2, {})
        assert progress.seconds_left() == 998.0
        for step in range(3, 41):
            clock.now += 1.0
            progress.step(step, {})
        assert progress.seconds_left() == 960.0


def test_time_left_ignores_every_step_that_compiles():
    clock = Clock()
    with Progress("train", total=100, file=io.StringIO(), clock=clock) as progress:
        for step in range(1, 11):
            compiles = 5 if step < 6 else 6  # a new shape at step 6
            clock.now += 60.0 if step in (1, 6) else 2.0
            progress.step(step, {"compiles": compiles, "seconds": 1.0})
    assert progress.seconds_left() == 180.0  # the clock's two seconds: evaluations count


def test_steps_told_of_in_one_go_say_their_own_time():
    clock = Clock()
    with Progress("train", total=300, file=io.StringIO(), clock=clock) as progress:
        clock.now = 90.0  # compiling, and a hundred steps
        for step in range(1, 101):
            progress.step(step, {"compiles": 4, "seconds": 0.5})
        assert progress.seconds_left() == 100.0


def test_a_resumed_run_counts_its_own_steps_only():
    clock = Clock()
    with Progress("train", total=100, start=50, file=io.StringIO(), clock=clock) as progress:
        clock.now = 2.0
        progress.step(51, {})
        clock.now = 4.0
        progress.step(52, {})
        assert progress.seconds_left() == 96.0


def test_a_missing_reward_is_left_out_and_brackets_are_text():
    out = io.StringIO()
    with Progress("eval", total=1, file=out) as progress:
        progress.note("saved [bold]x[/bold] to /a")
        progress.step(1, {"reward": None, "accuracy": 0.5})
    assert out.getvalue().splitlines() == [
        "saved [bold]x[/bold] to /a",
        "eval  step 1/1  accuracy 0.5000",
    ]


def test_a_terminal_gets_one_live_line_that_ends_as_a_plain_one(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, clock = Terminal(), Clock()
    with Progress("train", total=2, file=out, clock=clock) as progress:
        clock.now = 1.0
        progress.step(1, {"reward": 0.25})
        progress.note("a note")
        progress.step(2, {"reward": 0.5})
    text = out.getvalue()
    assert "\x1b[" in text  # the line is redrawn in place
    assert "a note" in text
    assert text.rstrip().endswith("step 2/2  reward 0.5000")


def test_duration():
    assert [duration(s) for s in (0, 59.6, 3599, 3600)] == ["0:00", "1:00", "59:59", "1:00:00"]


def test_what_others_print_takes_the_live_line_off_the_terminal_first(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Progress("train", total=2, file=out):
        with above_live_line():
            position = out.tell()
            out.write("compiling the sampler\n")
        text = out.getvalue()
    assert text[:position].endswith("\x1b[2K")  # the line is erased, and nothing is drawn before
    assert text[position:].startswith("compiling the sampler\n\x1b[?25l")
    with above_live_line():  # no live line any more
        end = out.tell()
    assert out.tell() == end


def test_a_terminal_breaks_long_notes_between_words(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "30")
    out, path = Terminal(), "/a/path/that/is/longer/than/thirty/columns"
    with Progress("train", total=1, file=out) as progress:
        progress.note(f"partial: the fraction of digits in place, in {path}")
    lines = [line.strip() for line in out.getvalue().split("\n")]
    assert "partial: the fraction of" in lines[0]
    assert path in lines
