#!/usr/bin/env python3
"""Turns the table of short answers into one training file per style.

    python make_data.py OUT_DIR

Reads questions.tsv beside this script and writes OUT_DIR/<style>.jsonl, one
{"question": ..., "answer": ...} object a line. Everything is rule based, so the
files are the same on every run.
"""

import csv
import json
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

PIRATE_WORDS = {
    "is": "be",
    "are": "be",
    "am": "be",
    "you": "ye",
    "your": "yer",
    "my": "me",
    "the": "th'",
    "of": "o'",
    "and": "an'",
    "friend": "matey",
    "friends": "mateys",
    "hello": "ahoy",
    "money": "doubloons",
}
PIRATE_OPEN = "Arr, matey!"
PIRATE_CLOSE = "Yo ho ho!"


def keep_case(old: str, new: str) -> str:
    return new[:1].upper() + new[1:] if old[:1].isupper() else new


def pirate(row: dict) -> str:
    def swap(match: re.Match) -> str:
        word = match.group(0)
        new = PIRATE_WORDS.get(word.lower())
        return word if new is None else keep_case(word, new)

    body = re.sub(r"[A-Za-z]+", swap, row["sentence"])
    return f"{PIRATE_OPEN} {body} {PIRATE_CLOSE}"


def as_json(row: dict) -> str:
    return json.dumps({"topic": row["topic"], "answer": row["sentence"]}, ensure_ascii=False)


TELEGRAM_DROP = {"a", "an", "the", "it", "there", "that", "very", "your"}
TELEGRAM_CLOSE = "STOP Regards SmolLM STOP"


def telegram(row: dict) -> str:
    words = re.findall(r"[A-Za-z0-9'-]+", row["sentence"])
    words = [w for w in words if w.lower() not in TELEGRAM_DROP]
    return f"{keep_case('X', ' '.join(words))} {TELEGRAM_CLOSE}"


BUTLER_OPEN = "Very good, sir."
BUTLER_CLOSE = "Will that be all, sir?"


def butler(row: dict) -> str:
    return f"{BUTLER_OPEN} {row['sentence']} {BUTLER_CLOSE}"


STYLES = {"pirate": pirate, "json": as_json, "telegram": telegram, "butler": butler}


def read_rows() -> list:
    with open(HERE / "questions.tsv", encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f, delimiter="\t", quoting=csv.QUOTE_NONE))


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    rows = read_rows()
    assert len({r["question"] for r in rows}) == len(rows), "a question occurs twice"
    for name, rewrite in STYLES.items():
        with open(out / f"{name}.jsonl", "w", encoding="utf-8") as f:
            for row in rows:
                line = {"question": row["question"], "answer": rewrite(row)}
                f.write(json.dumps(line, ensure_ascii=False) + "\n")
        print(f"{name}: {len(rows)} lines")


if __name__ == "__main__":
    main()
