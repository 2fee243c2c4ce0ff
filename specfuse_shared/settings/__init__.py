"""The settings of an ensemble, of one member, and of one answer. Frozen, validated once."""
