"""Faults of sessions that were seen in the field, each by its number.

Every case has a test here whose name begins with its number, or is shown in full by tests
elsewhere, which SHOWN names; some have both.

| case | what must be true | shown by |
| --- | --- | --- |
| F1 | using and dropping more sessions than there are places goes on for ever | here |
| F2 | a continuation never starts from empty | SHOWN |
| F3 | what is cancelled gives its place back | here, SHOWN |
| F4 | two clients never meet in one session | here |
| F5 | a repeated command gets its first answer | SHOWN |
| F6 | a resumed session has every setting it had | SHOWN |
| F7 | a setting is honoured or refused by its name | here, SHOWN |
| F8 | every state has a bounded way out | here, SHOWN |
| F9 | past what was kept the gap is stated and the session goes on | here, SHOWN |
| F10 | an interruption leaves state and replica where they are | here, SHOWN |
| F11 | a failed turn leaves what was there before it | SHOWN |
| F17 | one exception ends nothing but its turn | here, SHOWN |
| F18 | a binding never changes silently | here, SHOWN |
| F19 | nobody queues behind who waits for a worker | here |
| F20 | status and error type tell the truth | here, SHOWN |
| F25 | only real progress moves the idle clock | SHOWN |
| F26 | every response ends in its last word | here |
| F27 | nothing of an old answer is told later | here, SHOWN |
| F28 | a patch merges deeply, and is refused as a whole by its path | here, SHOWN |
| F29 | what interrupts is a policy of the session | SHOWN |
| F30 | cancelling ends the generation only | here, SHOWN |
| F31 | an event sees all earlier ones applied | SHOWN |
| F32 | a duration is the samples sent | here |
| F33 | the user's audio is kept in a ring | here, SHOWN |
| F39 | a policy's call keeps nobody from the server | SHOWN |
| F40 | each observation is used, or superseded by a newer one and counted | SHOWN |
| F41 | an error is never taken for an action, and an answer is a map with actions | SHOWN |
"""

from __future__ import annotations

SHOWN: dict[str, tuple[str, ...]] = {
    "F2": (
        "tests/sessions/steps/test_machine.py"
        "::test_state_that_is_lost_is_stated_once_and_every_further_step_is_refused",
        "tests/sessions/steps/test_machine.py"
        "::test_a_step_does_not_come_to_a_new_worker_of_the_state",
        "tests/sessions/steps/test_with_workers.py"
        "::test_no_step_is_lost_doubled_or_done_on_nothing_whatever_happens",
    ),
    "F3": (
        "tests/gateway/test_cancellation.py::test_open",
        "tests/gateway/test_cancellation.py::test_open_that_makes_room",
        "tests/gateway/test_cancellation.py::test_resume",
        "tests/gateway/test_cancellation.py::test_command",
        "tests/gateway/test_cancellation.py::test_close_with_a_turn_in_flight",
        "tests/workers/test_cancellation.py::test_a_turn",
    ),
    "F5": (
        "tests/sessions/test_attachments.py"
        "::test_a_repeated_command_gets_the_first_answer_and_is_not_carried_out_again",
        "tests/sessions/test_attachments.py::test_a_refused_command_is_answered_so_every_time",
        "tests/sessions/steps/test_machine.py"
        "::test_a_repeated_step_gets_the_first_answer_and_is_not_done_again",
        "tests/gateway/test_native_steps.py"
        "::test_f5_a_step_whose_answer_was_lost_is_not_done_twice",
    ),
    "F6": ("tests/sessions/test_attachments.py::test_settings_are_intact_after_a_return",),
    "F7": (
        "tests/sessions/test_chosen_limits.py"
        "::test_a_limit_that_cannot_be_honoured_is_refused_by_name",
        "tests/sessions/test_verbs.py::test_a_bad_setting_is_refused_by_its_path",
    ),
    "F8": ("tests/sessions/test_life.py::test_every_state_but_closed_has_a_deadline",),
    "F9": (
        "tests/sessions/test_attachments.py"
        "::test_past_what_was_kept_the_gap_is_stated_and_the_session_goes_on",
    ),
    "F10": (
        "tests/workers/ar/test_llamacpp.py"
        "::test_an_interrupted_reply_leaves_its_beginning_and_the_conversation",
    ),
    "F11": (
        "tests/sessions/test_life.py::test_a_failing_engine_fails_its_turn_only",
        "tests/sessions/steps/test_machine.py"
        "::test_a_failed_step_leaves_the_committed_step_and_can_be_tried_again",
    ),
    "F17": ("tests/workers/test_runtime.py::test_an_engine_exception_fails_that_turn_alone",),
    "F18": (
        "tests/sessions/test_life.py"
        "::test_the_next_turn_waits_for_the_new_worker_and_knows_the_conversation",
    ),
    "F20": (
        "tests/gateway/test_realtime_socket.py::test_an_unknown_model_is_404",
        "tests/gateway/test_realtime_socket.py::test_a_full_gateway_says_try_later",
        "tests/gateway/test_translation.py::test_a_failed_response_says_why",
    ),
    "F25": (
        "tests/sessions/test_life.py::test_a_silent_client_does_not_move_the_idle_clock",
        "tests/sessions/test_life.py::test_speech_moves_the_idle_clock",
        "tests/sessions/test_life.py::test_a_long_reply_moves_the_idle_clock_while_it_is_sent",
    ),
    "F27": ("tests/gateway/test_wires.py::test_a_turn_below_the_floor_holds_nothing",),
    "F28": (
        "tests/sessions/test_verbs.py::test_settings_merge_deeply_and_reach_the_stage",
        "tests/gateway/test_translation.py::test_a_patch_keeps_absent_and_null_apart",
    ),
    "F29": (
        "tests/sessions/test_voice_turn.py::test_without_interrupt_response_the_reply_goes_on",
        "tests/workers/speech_in/test_voice_activity.py::test_a_click_is_no_speech",
        "tests/workers/speech_in/test_voice_activity.py"
        "::test_a_doubtful_frame_neither_counts_nor_interrupts_the_beginning",
        "tests/workers/speech_in/test_session.py::test_a_session_chooses_its_minimum_of_speech",
        "tests/sessions/test_voice_turn.py::test_a_noise_does_not_end_a_reply_that_waits_for_words",
    ),
    "F30": (
        "tests/sessions/test_voice_turn.py::test_truncate_cuts_the_transcript_to_what_was_played",
    ),
    "F31": (
        "tests/sessions/test_verbs.py::test_a_verb_sees_all_earlier_ones_applied",
        "tests/workers/test_input_order.py::test_input_follows_the_commands_that_it_names",
    ),
    "F33": (
        "tests/workers/speech_in/test_session.py"
        "::test_input_that_nobody_committed_is_dropped_with_notice",
    ),
    "F39": (
        "tests/gateway/openpi/test_socket.py::test_f39_a_call_of_the_policy_holds_nobody_else_up",
    ),
    "F40": (
        "tests/gateway/openpi/test_socket.py"
        "::test_f23_f40_the_newest_observation_wins_and_each_is_answered",
        "tests/gateway/openpi/test_socket.py::test_more_than_may_wait_are_answered_all_the_same",
    ),
    "F41": (
        "tests/gateway/openpi/test_socket.py::test_f41_an_error_is_one_text_frame_and_then_a_close",
        "tests/gateway/openpi/test_requests.py::test_an_answer_without_actions_is_no_answer",
    ),
}
