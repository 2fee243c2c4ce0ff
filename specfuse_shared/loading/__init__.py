"""From a member's configuration to its model: files, conversion, plan, the packaged demo."""
