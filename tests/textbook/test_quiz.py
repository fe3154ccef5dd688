"""The quiz: its questions are well-formed, repeatable and right, and the command asks, marks and prints them."""

from __future__ import annotations

import io
import os
import pty
import random
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import guards
from tilewise import cli, errors
from tilewise.roofline import forms
from tilewise.textbook import quiz

RUN = [sys.executable, "-m", "tilewise.cli", "quiz"]


@pytest.mark.parametrize("make", quiz.MAKERS, ids=lambda make: make.__name__)
def test_each_kind_has_one_right_answer_among_others(make: quiz.Callable[[random.Random], quiz.Question]) -> None:
    for seed in range(4):
        question = make(random.Random(seed))
        assert 2 <= len(question.choices) <= 4
        assert len(set(question.choices)) == len(question.choices)
        assert question.answer == question.choices[question.right]
        assert question.text.endswith("?")
        assert question.why
        assert question == make(random.Random(seed))


def test_right_answers_are_at_no_place_more_than_at_others() -> None:
    places = [question.right for seed in range(4) for question in quiz.questions(len(quiz.MAKERS), seed)]
    assert {place for place in range(3) if places.count(place) > len(places) // 6} == {0, 1, 2}


def test_no_kind_comes_twice_before_all_came() -> None:
    many = quiz.questions(2 * len(quiz.MAKERS), seed=3)
    assert many[:5] == quiz.questions(5, seed=3) != quiz.questions(5, seed=4)
    # Numbers differ from question to question of a kind, words do not.
    kinds = [re.sub(r"\d[\d,.]*", "", question.text)[:24] for question in many]
    assert len(set(kinds[: len(quiz.MAKERS)])) >= len(quiz.MAKERS) - 2


def test_answers_are_those_of_the_closed_forms() -> None:
    for seed in range(5):
        question = quiz.standard_traffic(random.Random(seed))
        n, d = (int(number) for number in re.search(r"N (\d+), d (\d+)", question.text).groups())  # type: ignore[union-attr]  # the text has both
        assert question.answer == f"{forms.standard_forward(n, d).total:,}"


def test_no_questions_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="count: got 0; supported: a positive integer"):
        quiz.questions(0)


def test_answers_are_printed_without_a_terminal() -> None:
    done = CliRunner().invoke(cli.app, ["quiz", "--answers", "--count", "3", "--seed", "5"])
    assert done.exit_code == 0, done.output
    for number, question in enumerate(quiz.questions(3, seed=5), 1):
        assert f"{number}. {question.text}" in done.output
        assert f") {question.answer}: {question.why}." in done.output
    assert done.output.rstrip().endswith("tilewise quiz --count 3 --seed 5")


def test_without_a_seed_the_questions_can_be_had_again() -> None:
    first = CliRunner().invoke(cli.app, ["quiz", "--answers", "--count", "2"]).output
    repeat = first.rpartition("tilewise ")[2].split()
    assert CliRunner().invoke(cli.app, [*repeat, "--answers"]).output == first


def test_asking_without_a_terminal_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tilewise", "quiz"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    shown = capsys.readouterr()
    assert shown.err == "Error: stdin: got no terminal; supported: a terminal to answer on. Fix: pass --answers.\n"
    assert not shown.out


def test_on_a_terminal_it_asks_again_marks_and_counts() -> None:
    first, second = quiz.questions(2, seed=5)
    wrong = (second.right + 1) % len(second.choices)
    typed = ["z", "abcd"[first.right].upper(), "abcd"[wrong]]
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*RUN, "--count", "2", "--seed", "5"], stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    os.close(theirs)
    os.write(ours, "".join(f"{line}\n" for line in typed).encode())
    shown, _ = process.communicate(timeout=guards.SECONDS)
    os.close(ours)
    assert process.returncode == 0, shown
    assert "got 'z'; supported: one of a, b" in shown
    assert f"Right: {'abcd'[first.right]}) {first.answer}" in shown
    assert f"No: {'abcd'[second.right]}) {second.answer}" in shown
    assert "1 of 2 right." in shown
