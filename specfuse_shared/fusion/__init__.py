"""The method: rounds of draft, verify, select, commit, learn. Text and numbers; knows no tensor."""
