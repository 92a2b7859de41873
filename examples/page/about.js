// What the page says about models, by the names of their folders. Others appear under their names, without examples.

const VERSE = {
    en: "In the beginning was the Word, and the Word was with God, and the Word was God.",
    de: "Im Anfang war das Wort, und das Wort war bei Gott, und Gott war das Wort.",
};

const inBible = (source, target, title) => ({
    title,
    source,
    target,
    examples: [
        { title: "a verse", text: VERSE[source] },
        { title: source === "en" ? "Genesis 6" : "1. Mose 6", file: `texts/genesis-6.${source}.txt` },
    ],
});

export const ABOUT = {
    "bible-en-de": inBible("en", "de", "English to German"),
    "bible-de-en": inBible("de", "en", "German to English"),
    addresses: {
        title: "addresses of presidents",
        source: "en",
        target: "en",
        examples: [
            { title: "Fellow citizens", text: "Fellow citizens of the Senate and of the House of Representatives" },
            { title: "treasury", text: "The state of the Treasury" },
        ],
    },
    digits: {
        title: "digits",
        examples: [
            { title: "1", text: "...##... ..###... .#.##... ...##... ...##... ...##... ...##... ..####.." },
            { title: "0", text: "..####.. .##..##. .#....#. ##....## ##....## .#....#. .##..##. ..####.." },
            { title: "7", text: ".######. .....##. .....#.. ....##.. .#####.. ...##... ..##.... ..#....." },
        ],
    },
};

export const about = (name) => ({ title: name, source: "", target: "", examples: [], ...ABOUT[name] });
