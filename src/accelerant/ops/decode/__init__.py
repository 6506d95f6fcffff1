"""Steps of a decoder layer for one new token of each sequence, called by nn's models; no public function."""
