//! Amounts of memory, as people write and read them.

use std::str::FromStr;

/// A number of bytes given on the command line: `1500000`, `64MiB`, `2G`, `1.5GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bytes(pub(crate) u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1024.0 * 1024.0,
            "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
            _ => return Err(format!("{unit:?} is no unit of memory: use B, KB, MB, GB, KiB, MiB or GiB")),
        };
        let number: f64 = number.parse().map_err(|_| format!("{text:?} is no amount of memory, such as 512MiB"))?;
        let bytes = number * factor;
        if bytes.is_finite() && bytes < u64::MAX as f64 {
            Ok(Bytes(bytes as u64))
        } else {
            Err(format!("{text:?} is more memory than can be addressed"))
        }
    }
}

/// `bytes` with three figures and a binary unit: `20.2 MiB`.
pub(crate) fn show(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut amount = bytes as f64;
    let mut unit = 0;
    while amount >= 1024.0 && unit + 1 < units.len() {
        amount /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{amount:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::{Bytes, show};

    #[test]
    fn amounts_are_read_as_written() {
        for (text, bytes) in [("0", 0), ("1500", 1500), ("64MiB", 64 << 20), ("2G", 2 << 30), ("1.5gb", 1_500_000_000)]
        {
            assert_eq!(text.parse(), Ok(Bytes(bytes)), "{text}");
        }
        for text in ["", "x", "-1", "1.2.3", "3 parsecs", "99999999999999999999GiB", "nan"] {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn amounts_are_shown_short() {
        for (bytes, text) in [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (20_200_000, "19.3 MiB")] {
            assert_eq!(show(bytes), text);
        }
    }
}
