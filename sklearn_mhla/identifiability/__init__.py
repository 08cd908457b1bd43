"""What the data determine: certificates and their proofs."""
