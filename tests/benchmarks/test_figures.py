"""The tables in the documents match the raw numbers."""

import pytest

from benchmarks import tables, tables_performance


@pytest.mark.parametrize("document", tables.DOCUMENTS, ids=lambda path: path.name)
def test_tables_match_the_raw_numbers(document):
    text = document.read_text()
    assert tables.PLACE.search(text)
    assert tables.refreshed(text) == text


def test_an_outdated_table_is_replaced():
    text = "before\n\n<!-- table: decode -->\n| tokens | Mega |\n|---|---|\n| 64 | 1.0 |\n\nafter\n"
    new = tables.refreshed(text)
    assert new == f"before\n\n<!-- table: decode -->\n{tables.markdown(tables_performance.decode())}\nafter\n"
    assert tables.refreshed(new) == new
