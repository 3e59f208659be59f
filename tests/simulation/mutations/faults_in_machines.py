"""The mutations: a file, a text that occurs in it once, and what stands there instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """What is broken, and where."""

    name: str
    file: str
    old: str
    new: str
    seeds: str = "0:200"
    """The worlds that are looked at: for what shows seldom those in which it does."""


MUTATIONS = (
    Mutation(
        "another owner is let in with the same epoch",
        "workers/control.py",
        "            or fence.epoch > known[0]\n",
        "            or fence.epoch >= known[0]\n",
    ),
    Mutation(
        "a lower epoch is let in",
        "workers/control.py",
        "            or fence.epoch > known[0]\n",
        "            or fence.epoch != known[0]\n",
    ),
    Mutation(
        "a fence is valid whoever sends it",
        "workers/control.py",
        "        if fence.owner != gateway:\n            return False\n",
        "",
    ),
    Mutation(
        "sessions of a gateway that is gone stay",
        "workers/control.py",
        "                del self._gone_ms[gateway]\n"
        "                self._free_sessions_of(gateway, now_ms)\n",
        "                del self._gone_ms[gateway]\n",
    ),
    Mutation(
        "a raised floor leaves the last turn running",
        "workers/turn_control.py",
        "            if state.lane == lane and turn < floor:\n"
        "                self._cancel(turn, state, now_ms)\n",
        "            if state.lane == lane and turn < floor - 1:\n"
        "                self._cancel(turn, state, now_ms)\n",
    ),
    Mutation(
        "what a cancelled turn still makes is sent",
        "workers/turn_control.py",
        "        if state is None or state.cancel_by_ms is not None:\n"
        "            return\n"
        "        if self._retention.overfull:\n",
        "        if state is None:\n            return\n        if self._retention.overfull:\n",
    ),
    Mutation(
        "a repeated command is carried out again",
        "workers/session_control.py",
        "        if command in self._answers:\n            answer = self._answers[command]\n",
        "        if command is None:\n            answer = self._answers[command]\n",
    ),
    Mutation(
        "lost input is not stated",
        "workers/session_control.py",
        '        self.report(self.owner, StageEvent(self.session, "input_lost", arguments))\n',
        "",
    ),
    Mutation(
        "a session is freed while its turns run",
        "workers/session_control.py",
        "SessionState.CLOSING or self.turns or self._busy is not None:",
        "SessionState.CLOSING or self._busy is not None:",
    ),
    Mutation(
        "a close leaves turns to themselves",
        "workers/session_control.py",
        "            self.turns.cancel_all(now_ms)\n        self._finish_closing()\n",
        "        self._finish_closing()\n",
    ),
    Mutation(
        "input that came before is taken again",
        "workers/input_order.py",
        "if update.sequence <= self.received or update.sequence in self._held:",
        "if update.sequence in self._held:",
    ),
    Mutation(
        "the last acknowledged piece is kept",
        "workers/retention.py",
        "kept.pieces[0].sequence <= through:",
        "kept.pieces[0].sequence < through:",
    ),
    Mutation(
        "a repeated frame is delivered again",
        "protocol/stream.py",
        "        if first == self._through + 1 and not self._held:\n"
        "            self._through += len(messages)\n",
        "        if first <= self._through + 1 and not self._held:\n"
        "            self._through = max(self._through, first + len(messages) - 1)\n",
    ),
    Mutation(
        "nothing is ever sent again",
        "protocol/stream.py",
        "        batches = self._again(self._next, now_ms, self._patience_ms)\n",
        "        batches: list[Batch] = []\n",
    ),
    Mutation(
        "a silent peer is never lost",
        "protocol/link_state.py",
        "return now_ms >= self._heard_ms + self._settings.silence_ms",
        "return now_ms >= self._heard_ms + 1e9",
    ),
    Mutation(
        "frames of an earlier link are taken",
        "protocol/link.py",
        "                if self._link is None or frame.address != self._link.address:\n",
        "                if self._link is None:\n",
    ),
    Mutation(
        "an interruption does not reach the turn that runs",
        "sessions/lanes.py",
        "        self._floors[lane] = self._last_turn + 1\n",
        "        self._floors[lane] = self._last_turn\n",
        seeds="370:400",
    ),
    Mutation(
        "a turn that fails tells nobody",
        "sessions/orchestrator.py",
        "        self._emit(flow.result(error, frozenset(unsettled)))\n",
        "",
    ),
    Mutation(
        "the credit of a clause does not return",
        "sessions/orchestrator.py",
        "                edge_flow.held -= 1\n",
        "                pass\n",
    ),
    Mutation(
        "a response is complete before all is sent",
        "sessions/duplex/replies.py",
        "            if generation.complete and not waits and not generation.done:\n",
        "            if generation._drained and not waits and not generation.done:\n",
    ),
    Mutation(
        "an interrupted turn goes on",
        "sessions/duplex/replies.py",
        "        self._context.orchestrator.cancel(generation.lane)\n"
        "        self._finish(generation, ResponseStatus.CANCELLED, reason, None)\n",
        "        self._finish(generation, ResponseStatus.CANCELLED, reason, None)\n",
        seeds="10149:10150",
    ),
    Mutation(
        "text that was sent is sent again",
        "sessions/duplex/generation.py",
        "        delta = self._text[self._released : end]\n",
        "        delta = self._text[max(0, self._released - 7) : end]\n",
    ),
    Mutation(
        "half a transcript is read as a whole",
        "sessions/duplex/input.py",
        "            part.text = None  # What came of it before it failed is no transcript.\n",
        "            pass\n",
    ),
    Mutation(
        "a place is never given back",
        "sessions/admission.py",
        "        place = self._held[pipeline].pop(session)\n",
        "        place = self._held[pipeline][session]\n",
    ),
    Mutation(
        "a session more than the cores have room for is let in",
        "sessions/compute.py",
        "        if share * (self._open + 1) <= left:\n",
        "        if share * self._open <= left:\n",
    ),
    Mutation(
        "who came last is let in first",
        "sessions/openings.py",
        "insort(self._openings, opening, key=lambda known: (-known.priority, known.number))",
        "self._openings.insert(0, opening)",
    ),
    Mutation(
        "who leaves the queue is still counted",
        "sessions/openings.py",
        "        if opening in self._openings:\n"
        "            self._remove(opening)\n"
        "            self.serve(now_ms)\n",
        "        self.serve(now_ms)\n",
    ),
    Mutation(
        "positions are not told again",
        "sessions/openings.py",
        "opening.told.position != position",
        "False",
    ),
    Mutation(
        "a place that is free again is given to nobody who waits",
        "gateway/hosted.py",
        "            if len(self.openings):\n",
        "            if False:\n",
    ),
    Mutation(
        "nobody who waits is ever refused",
        "sessions/openings.py",
        "not opening.trying and now_ms >= opening.until_ms",
        "False",
    ),
    Mutation(
        "an open that finds no room is tried again at once",
        "sessions/openings.py",
        "                self._shortages.shut(attempt, lack, now_ms)\n",
        "                pass\n",
    ),
    Mutation(
        "a record is never removed",
        "sessions/directory.py",
        "                self._records.pop(session, None)\n",
        "                pass\n",
    ),
    Mutation(
        "turns that have stopped are counted for ever",
        "sessions/backlog.py",
        "        self._stopping.discard(turn)\n",
        "",
    ),
    Mutation(
        "a session that has ended waits for a worker",
        "gateway/hosted.py",
        "        self._placement.forget(hosted.id)\n",
        "",
    ),
    Mutation(
        "a lost worker is told to nobody",
        "gateway/hosted.py",
        "            if hosted.wires.bound_to(replica):\n"
        "                self.stage_lost(hosted.id, replica.stage, now_ms)\n",
        "            pass\n",
    ),
    Mutation(
        "a wedged worker is ready",
        "gateway/placement.py",
        "        return self.ready and not self.wedged(now_ms)\n",
        "        return self.ready\n",
    ),
    Mutation(
        "input behind a gap is applied and not reported",
        "workers/control.py",
        "        if not isinstance(event, CommandReceived):\n",
        "        if isinstance(event, Settle):\n",
    ),
    Mutation(
        "turns that have ended are counted as waiting",
        "workers/turn_control.py",
        "        self.totals.turns -= 1\n",
        "",
    ),
    Mutation(
        "what a client does is no progress",
        "sessions/lifecycle.py",
        '        """Something real happened: the idle clock starts again."""\n'
        "        self._progress_at_ms = now_ms\n",
        '        """Something real happened: the idle clock starts again."""\n',
    ),
    Mutation(
        "a session ends and leaves its responses open",
        "sessions/duplex/machine.py",
        "        self._replies.end_all(error)\n",
        "        pass\n",
    ),
    Mutation(
        "what was put out while nobody was there is dropped",
        "sessions/attachments.py",
        "        self._welcome(request, request.new_secret)\n        if self._log is not None:\n",
        "        if self._log is not None:\n            self._log.let_go()\n"
        "        self._welcome(request, request.new_secret)\n        if self._log is not None:\n",
    ),
    Mutation(
        "one output too many is told again",
        "sessions/output_log.py",
        "for kept in self._kept if kept.sequence > cursor]",
        "for kept in self._kept if kept.sequence >= cursor]",
    ),
    Mutation(
        "a gap is not stated",
        "sessions/output_log.py",
        "(cursor + 1, first - 1) if first > cursor + 1 else None",
        "None",
    ),
    Mutation(
        "an old secret stays good",
        "sessions/resume_secret.py",
        "            self._retired.append(self._previous)\n            self._previous = None\n",
        "            self._retired.append(self._previous)\n",
    ),
    Mutation(
        "the secret that a lost answer was asked with is no good",
        "sessions/resume_secret.py",
        "        self._previous = presented\n",
        "        self._previous = None\n",
    ),
    Mutation(
        "who was replaced is not told",
        "sessions/attachments.py",
        '            self.tell(self.controller, LetGo("replaced"))\n',
        "            pass\n",
    ),
    Mutation(
        "a command is carried out as often as it is said",
        "sessions/commands.py",
        "        if answer is None:\n            return False\n",
        "        if answer is None or answer.error is None:\n            return False\n",
    ),
    Mutation(
        "a call in doubt is taken for done",
        "sessions/record.py",
        "                if there is None:\n                    return None\n",
        "                if there is None:\n                    return Outcome.OK\n",
    ),
    Mutation(
        "the one that was used last is evicted",
        "gateway/hosted.py",
        "return min(alone, key=lambda hosted: hosted.session.idle_since_ms",
        "return max(alone, key=lambda hosted: hosted.session.idle_since_ms",
        seeds="10187:10190",
    ),
    Mutation(
        "a session with work in flight is evicted",
        "sessions/session.py",
        "            and not self._machine.working\n",
        "",
    ),
    Mutation(
        "a step that failed counts",
        "workers/turn_control.py",
        "        answered = state.step if status is TurnStatus.COMPLETED else None\n",
        "        answered = state.step if status is not TurnStatus.CANCELLED else None\n",
    ),
    Mutation(
        "a reset leaves the steps committed",
        "workers/step_order.py",
        "        self.committed = step\n        self.lost = False\n\n    def unusable",
        "        self.lost = False\n\n    def unusable",
    ),
    Mutation(
        "a request that failed is not answered",
        "sessions/oneshot/machine.py",
        "            self._emit(RequestFailed(error))\n",
        "            pass\n",
    ),
    Mutation(
        "the piece at the cursor is sent again",
        "workers/retention.py",
        "if piece.sequence > after]",
        "if piece.sequence >= after]",
    ),
    Mutation(
        "a step is answered again with what is left of its output",
        "workers/turn_control.py",
        "        if ended.void or kept.lost:\n",
        "        if ended.void:\n",
    ),
    Mutation(
        "a limit that a client chooses is taken for milliseconds",
        "sessions/chosen_limits.py",
        "int(value * 1000)",
        "int(value)",
    ),
    Mutation(
        "a reset that is refused is begun",
        "sessions/steps/machine.py",
        '        check_parameters(verb.parameters, "reset.parameters")\n'
        "        self._changes.begin(verb)\n",
        "        self._changes.begin(verb)\n"
        '        check_parameters(verb.parameters, "reset.parameters")\n',
    ),
    Mutation(
        "a rewind leaves the steps committed",
        "workers/session_control.py",
        "        if signal.name not in (RESET, REWIND):\n",
        "        if signal.name != RESET:\n",
        seeds="10216:10217",
    ),
    Mutation(
        "the answers to steps that never were are given again",
        "sessions/steps/machine.py",
        "        self._answers.forget_after(step)\n",
        "",
        seeds="10216:10217",
    ),
    Mutation(
        "what became of a checkpoint is not told",
        "sessions/steps/changes.py",
        "        self._over()\n        return verb\n",
        "        self._over()\n        return None if isinstance(verb, Checkpoint) else verb\n",
        seeds="10216:10217",
    ),
    Mutation(
        "a state that is lost is gone back from",
        "sessions/steps/machine.py",
        "        if self._lost and not self._changes.resetting:\n",
        "        if False:\n",
        seeds="10037:10038",
    ),
    Mutation(
        "a fork counts its steps from the beginning",
        "workers/session_control.py",
        '"committed_step": self._forked_at}',
        '"committed_step": 0}',
        seeds="10007:10008",
    ),
    Mutation(
        "what is late is given all the same",
        "sessions/steps/machine.py",
        "        if flight.answered:\n            return dropped(flight.verb.step)\n",
        "",
        seeds="169:170",
    ),
    Mutation(
        "a stop lets the step in flight be answered",
        "sessions/steps/machine.py",
        "        self._answer_flight(Reason.STOPPED, stopped())\n",
        "",
        seeds="10203:10204",
    ),
    Mutation(
        "what waits for the step in flight is forgotten",
        "sessions/steps/machine.py",
        "        self._begin_waiting()\n        self._go_on_changing()\n",
        "        self._go_on_changing()\n",
        seeds="10203:10204",
    ),
    Mutation(
        "a session that is freed keeps its bytes",
        "workers/control.py",
        "            self._ledger.release(name)\n",
        "",
    ),
    Mutation(
        "what is reserved already is not counted",
        "sessions/ledger.py",
        "            lacking = more - free\n",
        "            lacking = more - most\n",
    ),
    Mutation(
        "a session whose turn runs is parked",
        "workers/session_control.py",
        "        if self.turns or self.turns.kept_bytes:\n",
        "        if self.turns.kept_bytes:\n",
    ),
    Mutation(
        "a session is freed before its state is written",
        "workers/session_control.py",
        "self._next_order(), step, expires_at_s)\n                )\n",
        "self._next_order(), step, expires_at_s)\n                )\n"
        "                self.operation_done(OperationDone(self.session), now_ms)\n",
    ),
    Mutation(
        "a session that was parked begins anew",
        "sessions/bindings.py",
        "        self.restoring = True\n",
        "",
    ),
    Mutation(
        "what is parked outlives its session",
        "sessions/bindings.py",
        "            self.lost()\n            self.forget_parked()\n",
        "            self.lost()\n",
    ),
    Mutation(
        "what waits to come back outlives its session",
        "workers/session_control.py",
        "                if self._opening.restore:\n",
        "                if self._opening.restore and self._stored:\n",
    ),
    Mutation(
        "the one that was used last makes room",
        "workers/rooms.py",
        "                s.progress_ms,\n",
        "                -s.progress_ms,\n",
    ),
    Mutation(
        "a priority does not count",
        "workers/rooms.py",
        "                s.priority,\n                s.progress_ms,\n",
        "                s.progress_ms,\n",
    ),
    Mutation(
        "who does not answer is waited for",
        "workers/rooms.py",
        "self._asked[session.session] = now_ms + self._limits.room_answer_ms",
        "self._asked[session.session] = now_ms + 1e9",
        seeds="10318:10319",
    ),
    Mutation(
        "a store that is full is asked over and over",
        "workers/session_control.py",
        "            self._kept_ms = None if event.error is None else now_ms\n",
        "            self._kept_ms = None\n",
    ),
    Mutation(
        "a restored session is at step 0",
        "workers/session_control.py",
        '            self.turns.steps.restore(result.get("committed_step", 0))\n',
        "",
    ),
    Mutation(
        "a state is written while a turn changes it",
        "workers/session_control.py",
        "            or self._busy is not None\n            or self.turns\n        ):\n",
        "            or self._busy is not None\n        ):\n",
    ),
    Mutation(
        "a restored state is taken for the one that was lost",
        "sessions/steps/machine.py",
        "        self._committed, self._restorable = self._restorable, None\n",
        "        self._restorable = None\n",
        seeds="10007:10008",
    ),
    Mutation(
        "a store that is full is told of after each turn",
        "workers/session_control.py",
        "        if error is None or not self._snapshot_failed:\n",
        "        if error is None or self._snapshots:\n",
    ),
    Mutation(
        "what an earlier opening has stored ends the session",
        "workers/control.py",
        "SnapshotOrder(fence.epoch, command.opening) < session.opened_as:",
        "SnapshotOrder(fence.epoch, command.opening) <= session.opened_as:",
    ),
    Mutation(
        "an open waits for room on a stage while it holds others",
        "sessions/stages.py",
        "binding.bind(waits=binding is self._order[0])",
        "binding.bind()",
    ),
    Mutation(
        "an open waits for room before the others are given back",
        "sessions/stages.py",
        '            if not binding.freed:\n                binding.close("room")\n',
        "            pass\n",
    ),
    Mutation(
        "an open waits for room for ever",
        "workers/rooms.py",
        "if now_ms < until_ms and self._have_room_made(",
        "if self._have_room_made(",
    ),
)
