fn load_NAME(index: i32) -> Element {
    var words: Packed;
    for (var k = 0; k < DIGITS / 2; k++) {
        words[k] = word_NAME(index * (DIGITS / 2) + k);
    }
    return unpacked(words);
}

fn store_NAME(index: i32, value: Element) {
    var words = packed(value);
    for (var k = 0; k < DIGITS / 2; k++) {
        set_word_NAME(index * (DIGITS / 2) + k, words[k]);
    }
}
