"""Tells real jobs of 8 ranks what to record, at random, with one rank stopped meanwhile, and compares them with twins.

Each round trains under torchrun: commands add rules, pause, resume and undo at random steps, hostile files lie between
them, and one rank is stopped while one is sent. Then training must be bit-equal to that of ranks without a recorder,
every rank must have answered and been in time, and `recorder doctor` must find each expected row.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import recorder
from recorder.analyze.doctor.expected import compare
from recorder.format.commands import (
    COMMANDS,
    KINDS,
    PAUSE,
    REFUSED,
    RESUME,
    SET,
    UNDO,
    WAITING,
    Command,
    command_name,
    send,
)
from recorder.run.status import RankNow, RunWatch
from tests.rigs import jobs

SCRIPT = jobs.SCRIPTS / "commanded.py"
_RULES = (
    "site=output keep=tensor",
    "module=0 site=* keep=tensor,stats,fingerprint",
    "class=Linear site=input,grad_input keep=stats",
    "site=grad,param steps=::2 keep=tensor",
    "rank=1 site=output,grad_output",
)
_STEPS_A_COMMAND = 8
_PATIENCE_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5, help="jobs that are told something (5)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks of a job (8)")
    parser.add_argument("--sent", type=int, default=8, help="commands that a job is sent (8)")
    parser.add_argument("--seed", type=int, default=0, help="of the commands and of the rank that is stopped (0)")


def main(options: argparse.Namespace) -> int:
    chance = random.Random(options.seed)
    num_problems = 0
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            problems, said = _round(Path(folder), chance, options.ranks, options.sent)
        for problem in problems:
            print(f"  round {number}: {problem}")
        num_problems += len(problems)
        print(f"round {number}: {said}, {len(problems)} problems, {time.monotonic() - began_s:.0f} s", flush=True)
    return int(num_problems > 0)


def _round(folder: Path, chance: random.Random, num_ranks: int, num_sent: int) -> tuple[list[str], str]:
    num_steps = (num_sent + 3) * _STEPS_A_COMMAND
    (limit := folder / "limit.txt").write_text("4")
    arguments = (SCRIPT, f"--steps={num_steps}", f"--limit={limit}")
    nproc = ("--standalone", f"--nproc-per-node={num_ranks}")
    settings = jobs.recording("site=grad steps=::5 keep=stats", status_interval_s="0.2")
    told = jobs.torchrun(folder / "told", *arguments, f"--out={folder / 'told' / 'out'}", options=nproc, **settings)
    try:
        run = _run_of(folder / "told")
        watch = RunWatch(run)
        _until(watch, num_ranks, lambda rank: rank.status.step >= 2)
        num_hostile = 0
        for number in range(num_sent):
            stopped = chance.choice(watch.look()).status.pid if number == num_sent // 2 else None
            if stopped is not None:
                os.kill(stopped, signal.SIGSTOP)
            step = (number + 2) * _STEPS_A_COMMAND
            sent = send(run, _command(chance, step, number + 1 + num_hostile))
            if stopped is not None:
                time.sleep(2)
                os.kill(stopped, signal.SIGCONT)
            if chance.random() < 0.3:
                num_hostile += 1
                noise = chance.randbytes(chance.randrange(5000))
                (run / COMMANDS / command_name(sent.number + 1)).write_bytes(noise)
            _until(watch, num_ranks, partial(_has_heard, sent))
            limit.write_text(str(step - 4))  # the steps of the command still lie ahead
        limit.write_text(str(num_steps))
        finished = told.wait(_PATIENCE_S)
    finally:
        told.kill()
    plain = jobs.ranks(folder / "plain", *arguments[:2], f"--out={folder / 'plain' / 'out'}", num=num_ranks).wait(
        _PATIENCE_S
    )
    problems = [f"exit codes {finished.returncode}, {plain.returncode}"] * bool(finished.returncode or plain.returncode)
    for rank, (one, other) in enumerate(zip(finished.saved, plain.saved, strict=True)):
        try:
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        except AssertionError as error:
            problems.append(f"rank {rank} trained otherwise: {str(error).splitlines()[0]}")
    problems += _problems_of(finished.run, num_sent)
    counted = f"{num_sent} commands, {num_hostile} hostile files, {finished.run.num_rows} rows of {num_ranks} ranks"
    return problems, counted


def _command(chance: random.Random, step: int, number: int) -> Command:
    kind = chance.choice([SET, SET, SET, PAUSE, RESUME, UNDO])
    assert kind in KINDS
    last = step + chance.randrange(12) if chance.random() < 0.6 else None
    if kind == SET:
        return Command(kind=SET, from_step=step, to_step=last, rules=tuple(chance.sample(_RULES, 2)))
    if kind == PAUSE:
        return Command(kind=PAUSE, from_step=step, to_step=step + chance.randrange(6))
    if kind == UNDO and number > 1:
        return Command(kind=UNDO, from_step=step, undoes=chance.randrange(1, number))
    return Command(kind=RESUME, from_step=step)


def _has_heard(sent: Command, rank: RankNow) -> bool:
    return any(answer.number == sent.number for answer in rank.status.commands)


def _problems_of(run: recorder.Run, num_sent: int) -> list[str]:
    problems = []
    for writer in run.writers:
        answers = writer.manifest.commands
        if len(answers) != num_sent:
            problems.append(f"rank {writer.rank} answers {len(answers)} commands of {num_sent}")
        late = [one.number for one in answers if "learned of it" in one.why or one.state == WAITING]
        if late:
            problems.append(f"rank {writer.rank} was late for {late}, whose steps lay ahead")
        others = [one for one in answers if one.state == REFUSED and one.kind != UNDO]
        if others:
            problems.append(f"rank {writer.rank} refuses {others[0]}")
    expectation = compare(run)
    problems += expectation.problems
    for total in expectation.totals:
        if total.found + total.explained != total.expected:
            problems.append(f"{total.site}: {total.found} found of {total.expected}, {total.explained} explained")
    return problems


def _run_of(folder: Path) -> Path:
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        for manifest in (folder / "recordings").glob("*/_run.json"):
            return manifest.parent
        time.sleep(0.1)
    raise AssertionError("no run began")


def _until(watch: RunWatch, num_ranks: int, is_so: Callable[[RankNow], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s:
        ranks = watch.look()
        if len(ranks) == num_ranks and all(map(is_so, ranks)):
            return
        time.sleep(0.1)
    raise AssertionError(f"not in {_PATIENCE_S:g} s: {watch.look()}")
