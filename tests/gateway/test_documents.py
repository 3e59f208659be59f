"""The documents that describe the surfaces with a stream."""

from __future__ import annotations

import pytest

from gateway.surfaces.documents import Documents
from gateway.surfaces.native.documents import DOCUMENTS as NATIVE
from gateway.surfaces.worlds.documents import DOCUMENTS as WORLDS
from tests.gateway.json_schema import references, resolved

ALL = (NATIVE, WORLDS)


@pytest.mark.parametrize("documents", ALL, ids=lambda it: it.title)
def test_every_reference_of_a_document_leads_somewhere(documents: Documents) -> None:
    for document in (documents.json_schema, documents.asyncapi):
        found = set(references(document))
        assert len(found) > 30
        for reference in found:
            assert resolved(document, reference) is not None


@pytest.mark.parametrize("documents", ALL, ids=lambda it: it.title)
def test_every_frame_of_both_directions_is_in_both_documents(documents: Documents) -> None:
    schema, described = documents.json_schema, documents.asyncapi
    for side, frames, operation in (
        ("ClientFrame", documents.client_frames, "hear"),
        ("ServerFrame", documents.server_frames, "tell"),
    ):
        tags = {str(frame.__struct_config__.tag) for frame in frames}
        mapping = schema["$defs"][side]["discriminator"]["mapping"]
        assert set(mapping) == tags
        for tag, reference in mapping.items():
            assert resolved(schema, reference)["properties"]["type"]["enum"] == [tag]
        messages = described["operations"][operation]["messages"]
        assert {message["$ref"].rpartition("/")[2] for message in messages} == tags
        for message in messages:
            entry = resolved(described, resolved(described, message["$ref"])["$ref"])
            assert entry["summary"]
            properties = resolved(described, entry["payload"]["$ref"])["properties"]
            assert properties["type"]["enum"] == [entry["name"]]
    assert described["asyncapi"] == "3.0.0"
    assert described["operations"]["hear"]["action"] == "receive"
