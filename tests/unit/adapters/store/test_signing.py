"""Signatures of objects: who imported the bytes of a revision."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.store import AdapterNotTrusted, Envelope, open_store
from adapters.store.signing import Signer, Trust, public_key_from_pem

REVISION, OTHER = "sha256:" + "1" * 64, "sha256:" + "2" * 64
OURS, THEIRS = Signer.generate(), Signer.generate()


def envelope_of(content: bytes) -> Envelope:
    return Envelope(REVISION, hashlib.sha256(content).hexdigest(), len(content))


def trust_in(*signers: Signer, unverified: bool = False) -> Trust:
    keys = [public_key_from_pem(signer.public_pem) for signer in signers]
    return Trust(lambda: keys, unverified, unverified)


def test_only_the_trusted_key_and_only_this_envelope():
    signed = OURS.signed(envelope_of(b"abc"))
    trust = trust_in(OURS)
    trust.check_object(signed)
    trust.check_push(signed)
    trust_in(THEIRS, OURS).check_object(signed)  # while a key is replaced
    for forged in (
        envelope_of(b"abc"),
        THEIRS.signed(envelope_of(b"abc")),
        replace(signed, revision_id=OTHER),
        replace(signed, content_sha256="0" * 64),
        replace(signed, content_bytes=4),
        replace(signed, signature=bytes(64)),
        replace(signed, signature=signed.signature[:-1]),
    ):
        for check in (trust.check_object, trust.check_push, trust_in().check_object):
            with pytest.raises(AdapterNotTrusted, match="sha256:"):
                check(forged)
        trust_in(OURS, unverified=True).check_object(forged)


def test_keys_that_are_none():
    for pem in (b"", b"-----BEGIN PRIVATE KEY-----\nAA==\n-----END PRIVATE KEY-----\n", OURS.public_pem):
        with pytest.raises(ValueError, match="not a private key in PEM"):
            Signer.from_pem(pem)
    with pytest.raises(ValueError, match="not a public key in PEM"):
        public_key_from_pem(OURS.private_pem)
    again = Signer.from_pem(OURS.private_pem)
    assert again.signed(envelope_of(b"")) == OURS.signed(envelope_of(b""))


def test_a_store_signs_what_it_publishes_and_what_it_has(tmp_path: Path):
    url, file = f"file://{tmp_path}/store", tmp_path / "packed"
    file.write_bytes(b"tensors")
    old, new = open_store(url), open_store(url, signer=OURS)
    assert not old.publish(REVISION, file).signature
    old.publish(OTHER, file)
    unsigned_bytes = old.find(REVISION).num_bytes
    assert new.publish(REVISION, file) == new.verify(REVISION) == OURS.signed(envelope_of(b"tensors"))
    assert new.find(REVISION).num_bytes == unsigned_bytes + 64
    assert [new.sign(each) for each in (REVISION, OTHER, OTHER)] == [False, True, False]
    trust_in(OURS).check_object(new.verify(OTHER))
    new.fetch(OTHER, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"tensors"
    assert not list(old.incoming_older_than(0))
