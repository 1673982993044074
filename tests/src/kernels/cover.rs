//! A small set of rows in which every pair of values of every two columns meets.

/// Rows of indices: row `i` has `row[c] < sizes[c]`, and for each two columns every pair of indices stands in some row.
/// Greedy and deterministic: each row starts from a pair that is missing and takes, column by column, the index with which
/// the most missing pairs are met.
pub(super) fn pairwise(sizes: &[usize]) -> Vec<Vec<usize>> {
    let columns = sizes.len();
    let mut missing: Vec<(usize, usize, usize, usize)> = Vec::new();
    for first in 0..columns {
        for second in first + 1..columns {
            missing.extend((0..sizes[first]).flat_map(|a| (0..sizes[second]).map(move |b| (first, a, second, b))));
        }
    }
    let mut rows: Vec<Vec<usize>> = Vec::new();
    while let Some(&(first, a, second, b)) = missing.first() {
        let mut row: Vec<Option<usize>> = vec![None; columns];
        (row[first], row[second]) = (Some(a), Some(b));
        for column in 0..columns {
            if row[column].is_some() {
                continue;
            }
            let met = |value: usize| {
                let meets = |&&(c, a, d, b): &&(usize, usize, usize, usize)| {
                    (c == column && a == value && row[d] == Some(b)) || (d == column && b == value && row[c] == Some(a))
                };
                missing.iter().filter(meets).count()
            };
            // Where several are as good they take turns, so that the fill of a row is not always the first.
            let turn = rows.len();
            row[column] = (0..sizes[column]).max_by_key(|&value| (met(value), (value + turn) % sizes[column]));
        }
        let row: Vec<usize> = row.into_iter().map(|value| value.expect("every column has a value")).collect();
        missing.retain(|&(c, a, d, b)| row[c] != a || row[d] != b);
        rows.push(row);
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::pairwise;

    #[test]
    fn every_pair_meets_and_rows_are_few() {
        let sizes = [11, 9, 7, 3, 2, 2];
        let rows = pairwise(&sizes);
        for first in 0..sizes.len() {
            for second in first + 1..sizes.len() {
                for a in 0..sizes[first] {
                    for b in 0..sizes[second] {
                        assert!(rows.iter().any(|row| row[first] == a && row[second] == b));
                    }
                }
            }
        }
        assert!(rows.len() < 160, "{} rows", rows.len());
    }
}
