// Which words of a source the words of its translation look at, from the weights of cross attention.

/** The words of tokens: each word has its text and its line, and each token the number of its word, or -1. */
export function wordsOf(tokens, types, segmented, separator) {
    const [words, ofTokens] = [[], []];
    let [line, begins] = [0, true];
    for (const token of tokens) {
        if (token === separator) {
            line += 1;
            begins = true;
            ofTokens.push(-1);
            continue;
        }
        const [type] = types.decode([token]);
        if (begins || segmented.begins(type)) words.push({ types: [], line });
        words.at(-1).types.push(type);
        ofTokens.push(words.length - 1);
        begins = false;
    }
    return { words: words.map(({ types, line }) => ({ text: segmented.join(types), line })), ofTokens };
}

/**
 * Weights (target words, source words): of a word's tokens the mean, over its tokens of the source the sum.
 *
 * `rows` are the weights of each target token, from the step that chose it.
 */
export function byWord(rows, target, source) {
    const width = source.words.length;
    const weights = new Float32Array(target.words.length * width);
    const tokens = new Float32Array(target.words.length);
    target.ofTokens.forEach((word, token) => {
        if (word < 0) return;
        tokens[word] += 1;
        source.ofTokens.forEach((place, n) => {
            if (place >= 0) weights[word * width + place] += rows[token][n];
        });
    });
    return weights.map((weight, n) => weight / tokens[Math.floor(n / width)]);
}
