"""A worker takes what a trusted key has signed: pushes, objects of the store, files of its disk."""

from pathlib import Path

import pytest
from support.adapters.held_adapters import StoredAdapters, announced, running_worker, sent

from adapters.packed import read_packed
from adapters.store import AdapterNotTrusted, Envelope, open_store
from adapters.store.signing import Signer, Trust, public_key_from_pem

OURS = Signer.generate()


def strict() -> Trust:
    keys = (public_key_from_pem(OURS.public_pem),)
    return Trust(lambda: keys, False, False)


def forged_file(stored: StoredAdapters, tmp_path: Path) -> tuple[str, Path]:
    """The tensors of one adapter in a file that says that they are another's, which nothing in it contradicts."""
    victim, other = stored.ids[:2]
    path = tmp_path / "forged"
    content = stored.packed[other].read_bytes()
    assert content.count(other.encode()) == 1
    path.write_bytes(content.replace(other.encode(), victim.encode()))
    assert read_packed(path).metadata.revision_id == victim
    return victim, path


async def test_forged_tensors_are_not_taken_under_a_revision_id(stored: StoredAdapters, tmp_path: Path):
    victim, forged = forged_file(stored, tmp_path)
    envelope, content = announced(victim, forged)
    replayed = OURS.signed(announced(victim, stored.packed[victim])[0]).signature  # of the true content

    async with running_worker(stored, tmp_path, trust=strict()) as worker:
        for pushed in (
            envelope,
            Signer.generate().signed(envelope),
            Envelope(envelope.revision_id, envelope.content_sha256, envelope.content_bytes, replayed),
        ):
            with pytest.raises(AdapterNotTrusted, match=f"the push of {victim}"):
                await worker.residency.put(pushed, sent(content), 5)
        assert (worker.host_bytes(), worker.engine.held) == (0, {})
        genuine, content_of_it = announced(victim, stored.packed[victim])
        await worker.residency.put(OURS.signed(genuine), sent(content_of_it), 5)
        assert victim in worker.engine.held


async def test_an_object_that_was_replaced_in_the_store_is_not_loaded(stored: StoredAdapters, tmp_path: Path):
    victim, forged = forged_file(stored, tmp_path)
    stored.store.delete(victim)
    signing = open_store(f"file://{stored.folder}", signer=OURS)

    async with running_worker(stored, tmp_path, trust=strict()) as worker:
        for signer in (None, Signer.generate()):
            attacked = open_store(f"file://{stored.folder}", signer=signer)
            attacked.publish(victim, forged)
            with pytest.raises(AdapterNotTrusted, match="prelude adapters sign"):
                await worker.residency.ensure(victim, 5)
            assert (worker.host_bytes(), worker.engine.held) == (0, {})
            stored.store.delete(victim)
        signing.publish(victim, stored.packed[victim])
        await worker.load(victim)
        file = worker.disk / victim.replace(":", "-")
        assert file.stat().st_size == signing.find(victim).num_bytes == worker.residency._disk.used_bytes


async def test_a_file_of_the_disk_that_nobody_signed_is_fetched_again(stored: StoredAdapters, tmp_path: Path):
    """Such as one from before there were signatures."""
    revision_id = stored.ids[0]

    async with running_worker(stored, tmp_path) as worker:
        await worker.put_on_disk(revision_id)
    assert open_store(f"file://{stored.folder}", signer=OURS).sign(revision_id)
    async with running_worker(stored, tmp_path, trust=strict()) as worker:
        assert worker.hub.on_disk == {revision_id}
        await worker.residency.ensure(revision_id, 5)
        assert worker.reads == [revision_id]
        await worker.on_disk(revision_id)
    async with running_worker(stored, tmp_path, trust=strict()) as worker:
        await worker.residency.ensure(revision_id, 5)
        assert worker.reads == []
