"""What must hold of every entry of the registries of columns, sites and encodings, whoever adds one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from recorder.analyze.doctor.slots import SLOT_SITES
from recorder.columns import COLUMNS, KEY, NONFINITE, PHASES, SCHEMAS, Column, Role, schema_of
from recorder.format.encodings import ALL_ENCODINGS, ENCODINGS
from recorder.records import Measured
from recorder.sites import ALL_SITES, FORMAT_VERSION, PROGRAM_SITES, SITE_OF, SITES, Kind, Site, values_of


@pytest.mark.parametrize(
    "names", [[one.name for one in COLUMNS], SITES, ENCODINGS], ids=["columns", "sites", "encodings"]
)
def test_no_name_is_given_twice(names: Sequence[str]) -> None:
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_a_column_that_a_minor_version_adds_may_be_null_and_is_no_key(column: Column) -> None:
    assert not column.since or not (column.is_required or column.role is Role.KEY)


def test_the_key_is_of_the_columns_of_that_role() -> None:
    assert set(KEY) == {column.name for column in COLUMNS if column.role is Role.KEY}


def test_every_statistic_and_count_is_measured() -> None:
    wanted = [column.name for column in COLUMNS if column.role in (Role.STATISTIC, Role.COUNT, Role.DETAIL)]
    assert [name for name in Measured._fields if name not in ("fingerprint", "note")] == wanted
    assert {column.role for column in COLUMNS if column.name in NONFINITE} == {Role.COUNT}


def test_each_version_has_the_columns_of_the_one_before_it() -> None:
    for minor in range(1, FORMAT_VERSION[1] + 1):
        assert set(schema_of(minor - 1).names) <= set(schema_of(minor).names)
    assert SCHEMAS[0].names == [column.name for column in COLUMNS]


@pytest.mark.parametrize("site", ALL_SITES, ids=lambda site: site.name)
def test_a_site_is_of_a_known_phase_and_doctor_judges_it_or_leaves_it_to_the_program(site: Site) -> None:
    assert site.phase in PHASES
    assert (site.name in SLOT_SITES) != (site.name in PROGRAM_SITES)
    assert site.kind is not Kind.STATE or site.phase == "optimizer"


@pytest.mark.parametrize("site", ALL_SITES, ids=lambda site: site.name)
def test_a_site_of_gradients_is_that_of_some_values(site: Site) -> None:
    assert not site.is_gradient or values_of(site.name) != site.name
    assert site.gradient is None or site.gradient in SITE_OF


def test_an_encoding_holds_the_content_or_names_the_row_that_does() -> None:
    for encoding in ALL_ENCODINGS:
        assert (encoding.read is None) == (encoding.target is not None), encoding.name
        assert encoding.read is not None or (encoding.write is None and encoding.join is None), encoding.name
