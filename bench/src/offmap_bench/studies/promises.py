"""What the library promises, the tests that hold it, and the last figures: the table that `offmap_bench.studies.blocks` writes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from offmap_bench.checks import trust

Table = dict[str, dict[str, str]]
"""{row: {column: cell}} of a page."""


@dataclass(frozen=True)
class Promise:
    """One sentence, the tests that hold it ("path::name"), the trials of `bench/tests/faults` that do, and other figures in words.

    A figure is made from tables of pages.
    """

    name: str
    sentence: str
    tests: tuple[str, ...]
    trials: tuple[str, ...] = ()
    figure: Callable[[Callable[..., Table]], str] | None = None


def _zoo(table: Callable[..., Table]) -> str:
    rows = re.findall(r"^\| \w+ \| .* \| (?:vmap|loop) \|$", (trust.DOCS / "hosts.md").read_text("utf-8"), re.MULTILINE)
    return f"{len(rows):,} models in the zoo ([models](models.md))"


def _memory(table: Callable[..., Table]) -> str:
    claims = table("speed", "Memory while scoring", first="claimed")
    more = claims["MB more for 1,000,000 rows than for 10,000, streamed"]["value"]
    return f"{more} MB more for a million rows than for ten thousand ([speed](speed.md))"


def _sign(table: Callable[..., Table]) -> str:
    modes = [
        table("uci", f"Detection, {mode}")["MaxWEnt ×5, default score"]["AUROC"] for mode in ("extrapolation", "interpolation")
    ]
    return f"AUROC {' and '.join(modes)} on UCI's two ways of being OOD ([UCI](uci.md))"


PROMISES = (
    Promise(
        "Reproducible scores",
        "The same seed, model and rows give the same weights to the bit and the same scores up to rounding, whatever the chunk, "
        "batch or order; and on one thread, with the same chunk, the same bits in every process (`chunk_size=\"auto\"` measures "
        "which is quicker, and two processes may find differently: pass a number where that matters).",
        ("tests/contracts/test_untouched.py::test_a_fit_repeats_to_the_bit",
         "tests/contracts/test_zoo.py::test_drawn_weights_are_bit_identical_for_any_chunk_and_order",
         "tests/contracts/test_zoo.py::test_outputs_and_scores_agree_for_any_batch_and_chunk",
         "tests/io/test_file.py::test_a_loaded_guard_answers_to_the_bit"),
        ("same_bits",),
        figure=_zoo,
    ),
    Promise(
        "An untouched model",
        "A fit changes nothing of the net: no weight, buffer, hook, mode or random state.",
        ("tests/contracts/test_untouched.py::test_a_fit_leaves_everything_as_it_was",
         "tests/guard/test_bad_input.py::test_a_failed_fit_leaves_the_host_as_it_was",
         "tests/posterior/test_noise.py::test_the_global_random_state_is_left_alone"),
        figure=_zoo,
    ),
    Promise(
        "Atomic files",
        "A file that has its name is whole, whenever a process is killed or a disk is full; the old one stays until then.",
        ("tests/io/test_file.py::test_a_failing_write_leaves_the_old_file_and_nothing_else",
         "tests/data/test_stream.py::test_nothing_is_left_of_what_fails"),
        ("no_room", "killed_fit", "killed_bench", "killed_score"),
    ),
    Promise(
        "Damage is noticed",
        "A file that was cut or in which bits were flipped is refused, or set aside and made again, and named.",
        ("tests/io/test_file.py::test_a_single_flipped_bit_anywhere_is_noticed",
         "bench/tests/runner/test_store.py::test_a_damaged_record_is_reported_by_name",
         "bench/tests/runner/test_hosts.py::test_a_damaged_file_is_said_and_made_again",
         "tests/serve/test_parts.py::test_files_that_are_no_exported_guard_are_refused"),
        ("damaged_guard", "damaged_checkpoint", "damaged_record", "damaged_scores", "damaged_export", "damaged_cache"),
    ),
    Promise(
        "No code run on load",
        "Reading a guard, a state, a record or a table runs nothing of what is in it.",
        ("tests/io/test_file.py::test_no_file_is_read_by_running_it",
         "tests/io/test_file.py::test_what_is_code_cannot_be_saved"),
        ("hostile_files", "changed_bytes"),
    ),
    Promise(
        "Bounded memory",
        "Scoring holds a block of rows at a time, however many there are.",
        ("bench/tests/speed/test_cli_large.py::test_the_record_of_five_million_rows_keeps_its_claims",
         "tests/model/test_forward.py::test_looped_draws_are_made_together_within_a_fixed_memory",
         "tests/serve/test_server.py::test_bad_requests_leave_no_memory_behind"),
        ("hostile_files", "soak"),
        figure=_memory,
    ),
    Promise(
        "Never NaN",
        "A score is a number or infinite (but for padding in a map that keeps positions), and numbers that are not finite are "
        "refused on the way in.",
        ("bench/tests/paper/test_synthetic.py::test_every_score_is_finite_or_infinite_but_never_nan",
         "tests/guard/test_bad_input.py::test_any_inputs_give_one_of_our_errors_or_scores",
         "tests/guard/test_bad_input.py::test_numbers_that_are_not_finite_when_asking"),
        ("whole_calls",),
    ),
    Promise(
        "Steady numbers",
        "Single precision says what double precision says, units of inputs and of means change nothing, and data with ties, "
        "copies or fewer rows than columns give finite numbers. Where data leave directions open, the law of the weights is the "
        "same, its draws are not; and a model's own log-variances count from −20 to 20, noise from 4.5e-5 to 2.2e4.",
        ("bench/tests/faults/test_single_precision.py::test_directions_of_one_amplitude_are_seen_in_the_data",
         "bench/tests/faults/test_single_precision.py::test_the_law_is_that_of_any_basis_of_equals_and_of_no_other",
         "tests/posterior/test_basis.py::test_rounding_does_not_choose_between_entries_of_one_size",
         "tests/test_likelihoods.py::test_log_variances_are_clamped_to_twenty"),
        ("single_precision", "rescaled", "degenerate"),
    ),
    Promise(
        "Resumable runs",
        "What is finished is neither lost nor done again, and the result is that of a run that was left alone.",
        ("tests/distributed/test_checkpoint.py::test_wherever_it_was_ended_the_fit_gives_the_same_guard",
         "tests/distributed/test_checkpoint.py::test_what_was_done_is_not_done_again",
         "bench/tests/runner/test_run.py::test_damaged_and_stale_records_are_run_again",
         "tests/cli/test_score_folder.py::test_what_is_finished_is_kept_and_nothing_else"),
        ("killed_fit", "killed_bench", "killed_score", "killed_rank"),
    ),
    Promise(
        "One score sign",
        "Higher is more OOD, for every score, method and detector; only scikit-learn's own names turn it, as they must.",
        ("tests/guard/test_fit.py::test_strange_inputs_score_higher_than_familiar_ones",
         "bench/tests/detectors/test_isolation_forest.py::test_scores_are_scikit_learns_with_the_sign_turned",
         "tests/integrations/test_sklearn.py::test_the_detector_has_the_sign_of_scikit_learn_and_beats_chance_by_far"),
        figure=_sign,
    ),
)  # fmt: skip


def page_table(table: Callable[..., Table]) -> str:
    """Promise, tests and figures as Markdown; `table` reads one of a page."""
    lines = ["| promise | held by | last measured |", "|---|---|---|"]
    for each in PROMISES:
        held = "<br>".join(f"`{test}`" for test in each.tests)
        figures = [tried(name) for name in each.trials if trust.read(name).done]
        figures += [] if each.figure is None else [each.figure(table)]
        lines.append(f"| **{each.name}.** {each.sentence} | {held} | {'<br>'.join(figures)} |")
    return "\n".join(lines)


def tried(name: str) -> str:
    """Trials on record, and how many of them failed."""
    found = trust.read(name)
    hangs = sum(failure.startswith("hang") for failure in found.failures.values())
    return f"[{name}](trust.md): {found.done:,} trials, {len(found.failures)} failures, {hangs} hangs"
