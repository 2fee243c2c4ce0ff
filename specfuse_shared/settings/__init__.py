"""What a user may set: of an ensemble, of one member, and for one answer. Frozen, validated once."""
