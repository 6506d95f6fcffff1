"""The steps of a decoder layer for one new token of a sequence: nn's models call them, no public name does."""
