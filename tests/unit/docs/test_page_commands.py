"""Every command of the pages is run by a test, or in the table of those that are not, and checked otherwise."""

import re

import pytest
from support.chart.helm_chart import needs_helm
from support.documents.desk import ADDED, PRINTED, TUTORIAL, WORDS, commands_to_run, with_words
from support.documents.not_run import NOT_RUN, reasons_of, words_of
from support.documents.pages import PAGES, commands_of

COMMANDS = [(page, command) for page in PAGES for command in commands_of(page)]


def test_no_entry_of_the_table_is_idle_or_overlaps():
    reasons = {command: reasons_of(command) for _, command in COMMANDS}
    used = [each for found in reasons.values() for each in found]
    assert [each.begins for each in NOT_RUN if each not in used] == []
    assert [command for command, found in reasons.items() if len(found) > 1] == []


def test_no_entry_of_the_readers_desk_is_idle():
    commands = [command for page in PAGES if page != TUTORIAL for command in commands_to_run(page)]
    typed = [with_words(command) for command in commands]
    assert [each for each in WORDS if not any(re.search(each, command) for command in commands)] == []
    assert [each for each in (*ADDED, *PRINTED) if not any(re.match(each, command) for command in typed)] == []


@needs_helm
@pytest.mark.parametrize(
    "command", sorted({command for _, command in COMMANDS if reasons_of(command)}), ids=lambda command: command[:50]
)
def test_what_is_not_run_is_checked(command: str):
    (entry,) = reasons_of(command)
    entry.check(words_of(command))
