"""Messages for clients name no address of the deployment, and a remedy."""

from adapters.store import AdapterNotTrusted
from router.public_errors import redact_addresses


def test_what_nobody_has_signed_names_the_remedies_of_imports_and_of_pushes():
    public = redact_addresses(AdapterNotTrusted("s3://bucket/prefix/abc has no signature"))
    assert isinstance(public, AdapterNotTrusted)
    assert "s3" not in str(public)
    for remedy in ("import it again", "integrity.signing_key", "integrity.trusted_keys"):
        assert remedy in str(public)
