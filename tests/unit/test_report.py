"""`horovodish report`: what it says about runs that are made up, so that what is wrong with them is known."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horovodish.predictions.workload import NEEDED
from horovodish.reports.diagnosis import sentences
from horovodish.reports.durations import text_of_bytes, text_of_seconds
from horovodish.reports.figures import Figures, Spans, figures_of, workload_of
from horovodish.reports.outlook import outlook
from horovodish.reports.page import report
from horovodish.reports.records import read
from support.browser import asked, needs_browser
from support.recorded import MS, PHASE, PHASES, RECORD, WAITS_TRACK, Bucket, block, objects, write_run

BUCKETS = [Bucket("bucket 0", 8 << 20, 0.5, 2, 12), Bucket("bucket 1", 8 << 20, 1.0, 2, 12)]


def figures(files: list[str]) -> Figures:
    return figures_of([read(Path(name)) for name in files])


def rows_of(page: Path) -> dict[str, list[str]]:
    rows = re.findall("<tr><td>(.*?)</td></tr>", page.read_text())
    return {first: cells for first, *cells in (row.split("</td><td>") for row in rows)}


def test_a_slow_rank(tmp_path: Path) -> None:
    known = figures(write_run(tmp_path, lambda rank, _: 50 if rank == 2 else 40, BUCKETS))
    first, second, *_ = sentences(known)
    assert re.match(r"Rank 2 comes 10 ms late in 100% of the steps: the others wait 19% of the time\.", first)
    assert "Communication is exposed for 2 ms of a step of 52 ms" in second
    assert known.late[2].max() == 0 and np.allclose(known.late[0], 0.010) and np.allclose(known.exposed, 0.002)
    assert np.allclose(known.hidden, 0.002), "the first bucket, behind the second half of the backward pass"
    assert list(known.times_last) == [0, 0, 2 * 60, 0]


def test_a_slow_rank_with_a_few_steps_that_are_slower(tmp_path: Path) -> None:
    known = figures(
        write_run(tmp_path, lambda rank, step: (90 if step % 12 == 5 else 52) if rank == 2 else 40, BUCKETS)
    )
    assert sentences(known)[0].startswith("Rank 2 comes 12 ms late in 100% of the steps")


def test_sets_of_ranks_wait_for_their_own_late_rank(tmp_path: Path) -> None:
    """Ranks 0 and 1 reduce together, and 2 and 3; rank 1 is slow."""
    named = {"hosts": [[0, 1, 2, 3]], "ranks": 2}
    slow = write_run(tmp_path, lambda rank, _: 40 + 30 * rank, BUCKETS, name="a", buckets_of="set 1: ", **named)
    others = write_run(tmp_path, lambda *_: 40, BUCKETS, name="b", offset=2, buckets_of="set 2: ", **named)
    first, *_ = sentences(figures([*slow, *others]))
    assert re.match(r"Rank 1 comes 30 ms late in 100% of the steps: rank 0 waits 42% of the time\.", first), first


def test_ranks_that_meet_seldom(tmp_path: Path) -> None:
    """As with LocalSGD(every=4): other steps reduce nothing."""
    known = figures(write_run(tmp_path, lambda rank, _: 50 if rank == 2 else 40, BUCKETS, every=4))
    first, *_ = sentences(known)
    assert first.startswith("Rank 2 comes 40 ms late in 100% of the steps where ranks meet: the others wait"), first


def test_an_evaluation_with_many_operations_is_no_step_with_many(tmp_path: Path) -> None:
    known = figures(write_run(tmp_path, lambda *_: 40, BUCKETS, burst=2000))
    first, *_ = sentences(known)
    assert first.startswith("Communication is exposed for 2 ms of a step of 42 ms"), first


def test_without_steps_it_is_said_who_was_last(tmp_path: Path) -> None:
    files = write_run(tmp_path, lambda rank, _: 50 if rank == 1 else 40, BUCKETS, ranks=2)
    ranks = [read(Path(name)) for name in files]
    for each in ranks:
        each.step_numbers, each.step_begins = each.step_numbers[:0], each.step_begins[:0]
    first, second = sentences(figures_of(ranks))
    assert first.startswith("Rank 1 was last in 120 of 120 operations. Another rank has waited 900 ms for it in all")
    assert second.startswith("No step of a wrapped optimizer was recorded")


def test_a_slow_link(tmp_path: Path) -> None:
    slow = [Bucket(each.name, each.bytes, each.ready, 60, each.tensors) for each in BUCKETS]
    files = write_run(tmp_path, lambda *_: 40, slow, hosts=[[0, 1], [2, 3]], phase="exchange")
    first, *_ = sentences(figures(files))
    assert re.match(
        r"The link between the hosts is slow: .* moves 140 MB of gradients per second and is exposed", first
    )


def test_one_huge_bucket(tmp_path: Path) -> None:
    huge = [Bucket("bucket 0", 1 << 20, 0.5, 1, 3), Bucket("bucket 1", 31_000_000, 1.0, 12, 30)]
    first, *_ = sentences(figures(write_run(tmp_path, lambda *_: 78, huge)))
    assert "The bucket 'bucket 1' has 31 MB, 97% of all bytes of a step" in first
    assert "exposed for 12 ms of a step of 90 ms" in first


def test_thousands_of_tiny_tensors(tmp_path: Path) -> None:
    tiny = [Bucket(f"tensor {number}", 240, 1.0, 0.01) for number in range(2000)]
    first, *_ = sentences(figures(write_run(tmp_path, lambda *_: 20, tiny, steps=8, ranks=2)))
    assert first.startswith("A step has 2000 operations of 240 B on average"), first
    assert "is exposed for 20 ms of a step of 40 ms" in first


def test_uneven_data(tmp_path: Path) -> None:
    cost = random.Random(0)
    drawn = {(rank, step): cost.choice([30, 60]) for rank in range(4) for step in range(60)}
    first, *_ = sentences(figures(write_run(tmp_path, lambda rank, step: drawn[rank, step], BUCKETS)))
    assert first.startswith("The ranks take turns to be late, by 30 ms in the median step"), first


def test_a_rank_that_swaps(tmp_path: Path) -> None:
    known = figures(write_run(tmp_path, lambda rank, step: 700 if (rank, step % 20) == (1, 7) else 40, BUCKETS))
    first, *_ = sentences(known)
    assert first.startswith("Rank 1 stops now and then: in 3 of 58 steps it is up to 660 ms late"), first


def test_bytes_and_time_by_dtype_and_link(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    files = write_run(tmp_path, lambda *_: 40, BUCKETS, hosts=[[0, 1], [2, 3]], phase="exchange")
    assert report(files, str(page)) == 0
    rows = re.findall("<tr><td>(.*?)</td></tr>", page.read_text())
    both = f"{60 * 2 * (8 << 20) / 1e9:.3g} GB"
    assert f"float32</td><td>memory of the host</td><td>120</td><td>{both}</td><td>240 ms</td><td>4.19 GB/s" in rows
    assert f"all</td><td>exchange between hosts</td><td></td><td>{both}</td><td>240 ms</td><td>4.19 GB/s" in rows
    assert "Bytes are those of the tensors, also in the row of the exchange." in page.read_text()


def test_a_healthy_run(tmp_path: Path) -> None:
    hidden = [Bucket("bucket 0", 8 << 20, 0.5, 2)]
    assert sentences(figures(write_run(tmp_path, lambda *_: 40, hidden))) == [
        "The ranks do their own work in 100% of a step of 40 ms, and hide 100% of the communication behind it."
    ]


def test_ranks_that_begin_to_record_at_different_steps_are_compared_by_step(tmp_path: Path) -> None:
    files = write_run(tmp_path, lambda rank, _: 50 if rank == 1 else 40, BUCKETS, ranks=2)
    whole = figures(files)
    first, second = (read(Path(name)) for name in files)
    later = first.submitted >= first.step_begins[10]
    for key in ("track", "submitted", "decided", "settled", "failed", "in_program"):
        setattr(first, key, getattr(first, key)[later])
    first.step_numbers, first.step_begins = first.step_numbers[10:], first.step_begins[10:]
    part = figures_of([first, second])
    assert part.steps.size == whole.steps.size - 10
    assert np.allclose(part.late, whole.late[:, 10:]) and np.allclose(part.exposed, whole.exposed[:, 10:])


@pytest.mark.parametrize("length", [0, 5, 20, 700, 5000, 9000])
def test_files_that_were_cut_off(tmp_path: Path, length: int) -> None:
    one, other = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2)
    Path(other).write_bytes(Path(other).read_bytes()[:length])
    assert report([one, other], str(tmp_path / "page.html")) == 0
    notes = re.findall("<strong>Note.</strong> (.*?)</p>", (tmp_path / "page.html").read_text())
    assert ["records of rank 1" in note for note in notes] == [True]
    assert ("end early" in notes[0]) == (length >= 700)


def test_many_files_that_were_cut_off_have_one_note(tmp_path: Path) -> None:
    files = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=3)
    for name in files:
        Path(name).write_bytes(Path(name).read_bytes()[:5000])
    assert report(files, str(tmp_path / "page.html")) == 0
    notes = re.findall("<strong>Note.</strong> (.*?)</p>", (tmp_path / "page.html").read_text())
    assert notes == ["The records of ranks 0, 1, 2 end early: they were killed, or could not write."]


def test_bytes_that_are_not_known_are_no_zero(tmp_path: Path) -> None:
    known, unknown = (Bucket(name, size, 0.5, 2) for name, size in (("known", 1 << 20), ("unknown", 0)))
    files = write_run(tmp_path, lambda *_: 40, [known, unknown])
    for name in files:
        Path(name).write_bytes(Path(name).read_bytes().replace(b'"bytes": 0', b'"other": 0'))
    page = tmp_path / "page.html"
    assert report(files, str(page)) == 0
    (row,) = re.findall("<td>float32</td><td>memory of the host</td>(.*?)</tr>", page.read_text())
    assert re.match(r"<td>120</td><td>[\d.]+ MB or more</td><td>.*</td><td>[\d.]+ MB/s or more</td>", row)


def test_a_file_that_was_cut_off_after_a_wait(tmp_path: Path) -> None:
    """Its page has no record of an operation."""
    one, other = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2)
    wait = np.array([(40 * MS, MS, WAITS_TRACK << 8 | PHASES["wait"] << 4 | PHASE)], RECORD)
    whole = Path(other).read_bytes()
    Path(other).write_bytes(whole[: whole.index(b"records\n")] + block(b"records\n", wait.tobytes()))
    assert report([one, other], str(tmp_path / "page.html")) == 0
    assert "records of rank 1" in (tmp_path / "page.html").read_text()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_damaged_files_give_a_page_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    (one,) = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=1, steps=4)
    damaged = bytearray(Path(one).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    Path(one).write_bytes(damaged)
    status = report([one], str(tmp_path / "page.html"))
    said = capsys.readouterr().err
    assert (status, said.count("\n")) in ((0, 0), (1, 1)), said


def test_files_that_make_no_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2)
    _, older = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2, begun=7, name="older")
    Path(other).write_bytes(Path(older).read_bytes())
    (tmp_path / "trace.json").write_text("[]")
    (tmp_path / "text.records").write_text("hello")
    (tmp_path / "idle.records").write_bytes(objects({"rank": 0, "hosts": [[0]], "begun": 1}))
    for files, words in [
        ([one, other], "of different runs"),
        ([one, str(tmp_path / "text.records")], "are two runs"),
        ([str(tmp_path / "text.records")], "is not a file of records"),
        ([str(tmp_path / "idle.records")], "has no operation"),
        ([str(tmp_path / "trace.json")], "is not a file of records"),
        ([str(tmp_path / "missing.records")], "No such file"),
    ]:
        assert report(files, str(tmp_path / "page.html")) == 1
        said = capsys.readouterr().err
        assert words in said and said.count("\n") == 1, said
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert report([one], str(loop)) == 1
    assert capsys.readouterr().err == f"horovodish: {loop}: Too many levels of symbolic links\n"
    assert not (tmp_path / "page.html").exists()


def test_a_page_has_the_events_of_an_elastic_job(tmp_path: Path) -> None:
    files = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2, begun=1_000_000_000)
    lines = ['{"time": 3.5, "event": "lost", "text": "rank 1 on node-0 was killed; 1 left"}', "cut o"]
    (tmp_path / "run.events.jsonl").write_text("\n".join(lines))
    page = tmp_path / "page.html"
    assert report(files, str(page)) == 0
    assert rows_of(page)["rank 1 on node-0 was killed; 1 left"] == ["2.5 s"]
    assert report(files, str(page), without_names=True) == 0
    assert "node-0" not in page.read_text()


def test_two_pages_beside_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = []
    for name, milliseconds in (("before", 50), ("after", 40)):
        files = write_run(tmp_path, lambda rank, _, slow=milliseconds: slow if rank == 1 else 40, BUCKETS, name=name)
        pages.append(str(tmp_path / f"{name}.html"))
        assert report(files, pages[-1]) == 0
    assert report(pages, str(tmp_path / "both.html")) == 0
    assert rows_of(tmp_path / "both.html")["median step"] == ["52 ms", "42 ms", "0.81"]
    before = Path(pages[1]).read_text()
    assert report(pages, pages[1]) == 1 and "give the page another name" in capsys.readouterr().err
    assert report(pages, str(tmp_path / "no.html"), without_names=True) == 1
    assert "--without-names is for records" in capsys.readouterr().err
    assert Path(pages[1]).read_text() == before and not (tmp_path / "no.html").exists()
    assert report([pages[0]], str(tmp_path / "both.html")) == 1 and "two pages" in capsys.readouterr().err
    (tmp_path / "other.html").write_text("<p>")
    assert report([pages[0], str(tmp_path / "other.html")], str(tmp_path / "both.html")) == 1


def test_a_page_needs_no_network_and_can_leave_out_names(tmp_path: Path) -> None:
    files = write_run(tmp_path, lambda *_: 40, BUCKETS, hosts=[[0, 1], [2, 3]])
    page = tmp_path / "page.html"
    assert report(files, str(page)) == 0
    text = page.read_text()
    assert {name: name in text for name in ("node-1", "/home/me/train.py")} == {
        "node-1": True,
        "/home/me/train.py": True,
    }
    assert not re.findall(r"(?:src|href)=", text)
    data = json.loads(re.search(r'id="report">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert len(data["charts"]) == 2 and "traces" not in data, "the script reads this before the page is seen"
    traces = re.findall(r'id="trace-\d">(.*?)</script>', text, re.DOTALL)
    assert [json.loads(trace)[0]["args"]["name"] for trace in traces] == ["rank 0 on node-0"] * 2
    assert report(files, str(page), without_names=True) == 0
    text = page.read_text()
    assert [name for name in ("node-", "/home", "host-2") if name in text] == ["host-2"]


def test_a_page_without_names_has_no_marks(tmp_path: Path) -> None:
    files = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2)
    for name in files:
        at = read(Path(name)).step_begins[1:]
        marks = objects(*({"mark": "wrote /home/me/model.pt", "at": int(each)} for each in at))
        Path(name).write_bytes(Path(name).read_bytes() + marks)
    page = tmp_path / "page.html"
    assert report(files, str(page), without_names=True) == 0
    assert [word for word in ("/home", "wrote") if word in page.read_text()] == []
    assert report(files, str(page)) == 0
    assert page.read_text().count("wrote /home/me/model.pt") > 4


def test_starts_of_a_run_whose_name_ends_in_a_number(tmp_path: Path) -> None:
    files = [
        *write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2, name="lr-0.5"),
        *write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2, begun=7, name="lr-0.5.2"),
    ]
    page = tmp_path / "page.html"
    assert report(files, str(page)) == 0
    assert "The engines started 2 times" in page.read_text()


@needs_browser
def test_a_chart_is_drawn_when_it_is_seen_and_all_are_when_the_page_is_printed(tmp_path: Path) -> None:
    """Also if the screen is dark: paper is white."""
    page = tmp_path / "page.html"
    assert report(write_run(tmp_path, lambda *_: 40, BUCKETS), str(page)) == 0
    ask = """const all = (what) => [...document.querySelectorAll(what)];
      const drawn = () => all(".uplot").map((each) => each.clientWidth);
      until(() => drawn().length > 0, () => {
        const seen = drawn();
        dispatchEvent(new Event("beforeprint"));
        queueMicrotask(() => answer([seen.length, drawn(), color("ground")]));
      });"""
    page.write_text(page.read_text().replace("<h2>What steps", '<p style="height:9000px"><h2>What steps'))
    assert asked(page, ask) == [1, [640, 640], "#fff"]


@needs_browser
def test_the_picture_of_a_step_keeps_its_shape_and_its_letters_in_a_narrow_window(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert report(write_run(tmp_path, lambda *_: 40, BUCKETS), str(page)) == 0
    ask = """document.body.style.width = "360px";
      const svg = document.querySelector("svg"), drawn = svg.getBoundingClientRect(), whole = svg.viewBox.baseVal;
      const letters = parseFloat(getComputedStyle(svg.querySelector("text")).fontSize);
      answer([drawn.width / whole.width * letters, drawn.height / whole.height * letters]);"""
    across, along = asked(page, ask)
    assert across == pytest.approx(along, rel=0.01) and across > 9


def test_long_times_and_large_sizes_have_no_exponents() -> None:
    assert [text_of_seconds(each) for each in (3723.4, 0.9999, 2.384)] == ["3723 s", "1000 ms", "2.38 s"]
    assert text_of_bytes(2.5e12) == "2500 GB"


def test_a_full_disk_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = write_run(tmp_path, lambda *_: 40, BUCKETS, ranks=2)
    assert report(files, "/dev/full") == 1
    assert capsys.readouterr().err == "horovodish: /dev/full: No space left on device\n"


def test_names_do_not_become_elements(tmp_path: Path) -> None:
    odd = [Bucket("</script><b>'\"&", 8 << 20, 1.0, 5)]
    assert report(write_run(tmp_path, lambda *_: 40, odd), str(tmp_path / "page.html")) == 0
    text = (tmp_path / "page.html").read_text()
    assert (text.count("<b>"), text.count("</script>")) == (0, 5)


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=12), st.lists(st.integers(-5, 80)))
def test_spans_against_counting(spans: list[tuple[int, int]], times: list[int]) -> None:
    union = Spans(np.array([a for a, _ in spans], np.int64), np.array([a + n for a, n in spans], np.int64))
    covered = {moment for a, n in spans for moment in range(a, a + n)}
    expected = [sum(moment < time for moment in covered) for time in times]
    assert union.before(np.array(times, np.int64)).tolist() == expected


def test_the_end_says_what_more_ranks_would_give(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    slow = [Bucket("bucket 0", 100_000_000, 1.0, 20, 25)]
    files = write_run(tmp_path, lambda *_: 40, slow)
    assert report(files, str(page)) == 0
    assumed, four, sixteen, threshold = outlook(figures(files))
    assert page.read_text().index("What more ranks would give") > page.read_text().index("Versions and settings")
    assert "the prediction is a step of" in assumed and assumed.endswith("measured were 60 ms.")
    assert "hosts of 4 ranks, and links of 25 Gbit/s and 20 us between them" in assumed
    assert assumed in page.read_text()
    gains = [[float(gain) for gain in re.findall(r"([\d.]+) times", text)] for text in (four, sixteen)]
    assert four.startswith("With 16 ranks, ") and sixteen.startswith("With 64 ranks, ")
    assert 0 < gains[0][0] < gains[0][1] <= 4 and gains[0][0] < gains[1][0] < gains[1][1] <= 16
    # Of 25 tensors of 4 MB, the first 24 are reduced behind the backward pass if they are buckets of their own.
    assert re.match(r"A fusion threshold of \d MB would give a step of 4\d\.\d ms instead of 60", threshold), threshold


def test_the_end_of_a_run_with_little(tmp_path: Path) -> None:
    assert outlook(figures(write_run(tmp_path, lambda *_: 40, BUCKETS, every=4))) == [
        f"Nothing is predicted: {NEEDED}."
    ]
    slow = write_run(tmp_path, lambda *_: 40, [Bucket("bucket 0", 8 << 20, 1.0, 60)])
    assumed, nothing = outlook(figures(slow))
    assert assumed.endswith("measured were 100 ms.") and nothing.startswith("That does not fit, so nothing more is")
    hidden = [Bucket("bucket 0", 4 << 10, 0.5, 1)]
    *_, threshold = outlook(figures(write_run(tmp_path, lambda *_: 40, hidden)))
    assert threshold == "No fusion threshold from 1 to 128 MB would make the step 2% shorter."


def test_ranks_without_records_have_a_share_of_the_batch(tmp_path: Path) -> None:
    known = workload_of(figures(write_run(tmp_path, lambda *_: 40, BUCKETS)[:2]))
    assert known is not None and known["ranks"] == 4
